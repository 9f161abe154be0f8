// Kernels that are called one array at a time, and which of them run here.
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/bindings.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/kernels.hpp"
#include "step/hypers.hpp"

namespace zero_opt::bindings {
namespace {

float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

void convert(std::int64_t numel, const std::pair<std::uintptr_t, std::string>& from,
             const std::pair<std::uintptr_t, std::string>& to, const std::string& isa) {
  const Kernels& kernels = table(isa);
  const Format from_format = float_named(from.second), to_format = float_named(to.second);
  if (from_format != Format::kFloat32 && to_format != Format::kFloat32) {
    throw std::invalid_argument("one of the two arrays must be float32");
  }
  const py::gil_scoped_release unlocked;
  kernels.convert({numel, memory(from.first), memory(to.first), from_format, to_format});
}

MomentRun make_moments(std::int64_t numel, const std::string& dtype,
                       const std::map<std::string, std::uintptr_t>& addresses, double step) {
  const Format format = format_named(dtype);
  if (format != Format::kBfloat16 && format != Format::kBlock8) {
    throw std::invalid_argument("no compact format of moments: '" + dtype + "'");
  }
  const auto bases = [&](const char* role) {
    return format == Format::kBlock8 ? static_cast<std::uint16_t*>(memory(addresses.at(role))) : nullptr;
  };
  return {numel,
          format,
          dither_of(step),
          memory(addresses.at("exp_avg")),
          memory(addresses.at("exp_avg_sq")),
          bases("exp_avg_base"),
          bases("exp_avg_sq_base"),
          floats(addresses.at("plain_exp_avg")),
          floats(addresses.at("plain_exp_avg_sq"))};
}

void pack_moments(const MomentRun& run, const std::string& isa) {
  const Kernels& kernels = table(isa);
  const py::gil_scoped_release unlocked;
  kernels.pack_moments(run);
}

void unpack_moments(const MomentRun& run, const std::string& isa) {
  const Kernels& kernels = table(isa);
  const py::gil_scoped_release unlocked;
  kernels.unpack_moments(run);
}

void fma_array(std::int64_t numel, std::uintptr_t a, std::uintptr_t b, std::uintptr_t c, std::uintptr_t out,
               const std::string& isa) {
  const Kernels& kernels = table(isa);
  const py::gil_scoped_release unlocked;
  kernels.fma({numel, floats(a), floats(b), floats(c), floats(out)});
}

void mean(std::int64_t numel, const std::string& dtype, const std::vector<std::uintptr_t>& sources, std::uintptr_t out,
          bool add, int divisor) {
  if (sources.size() < 2) throw std::invalid_argument("a mean needs the chunks of two ranks or more");
  std::vector<const void*> chunks;
  for (const std::uintptr_t source : sources) chunks.push_back(memory(source));
  const auto count = static_cast<std::int32_t>(chunks.size());
  const MeanRun run = {numel, count, divisor == 0 ? count : divisor, mean_format(dtype), add, chunks.data(), memory(out)};
  const py::gil_scoped_release unlocked;
  chosen_kernels().mean(run);
}

std::vector<std::string> names_of(const std::vector<const Kernels*>& tables) {
  std::vector<std::string> names;
  for (const Kernels* kernels : tables) names.emplace_back(kernels->name);
  return names;
}

}  // namespace

void bind_kernels(py::module_& m) {
  py::class_<MomentRun>(m, "MomentRun")
      .def(py::init(&make_moments), py::arg("numel"), py::arg("dtype"), py::arg("addresses"), py::kw_only(),
           py::arg("step") = 1.0);
  m.def("convert", &convert, py::arg("numel"), py::arg("from_"), py::arg("to"), py::arg("isa") = "");
  m.def("pack_moments", &pack_moments, py::arg("run"), py::arg("isa") = "");
  m.def("unpack_moments", &unpack_moments, py::arg("run"), py::arg("isa") = "");
  m.def("fma", &fma_array, py::arg("numel"), py::arg("a"), py::arg("b"), py::arg("c"), py::arg("out"),
        py::arg("isa") = "");
  m.def("mean", &mean, py::arg("numel"), py::arg("dtype"), py::arg("sources"), py::arg("out"), py::arg("add"),
        py::arg("divisor") = 0);
  m.def("isas", []() { return names_of(available_kernels()); });
  m.def("compiled_isas", []() { return names_of(compiled_kernels()); });
  m.def("processor_isa", []() { return std::string(processor_isa()); });
  m.def("isa", []() { return std::string(chosen_kernels().name); });
}

}  // namespace zero_opt::bindings
