// The Python face of the kernels; the only file that knows pybind11. Tensors arrive as raw addresses,
// checked by zero_opt/cpu_adam.py, so that one binary serves every version of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.hpp"
#include "peer_words.hpp"

namespace py = pybind11;
using zero_opt::AdamHypers;
using zero_opt::AdamRun;
using zero_opt::AdamScalars;
using zero_opt::Kernels;

namespace {

float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

const Kernels& table(const std::string& isa) {
  return isa.empty() ? zero_opt::chosen_kernels() : zero_opt::kernels_named(isa);
}

AdamScalars make_scalars(double lr, double beta1, double beta2, double eps, double weight_decay, double step,
                         bool decoupled, bool maximize) {
  if (!(step >= 1.0)) throw std::invalid_argument("step counts from 1, got " + std::to_string(step));
  return zero_opt::adam_scalars({lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize});
}

AdamRun make_run(const AdamScalars& scalars, std::int64_t numel, std::uintptr_t param, std::uintptr_t grad,
                 std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t max_exp_avg_sq) {
  if (numel < 0) throw std::invalid_argument("numel must not be negative, got " + std::to_string(numel));
  if (numel > 0 && (param == 0 || grad == 0 || exp_avg == 0 || exp_avg_sq == 0)) {
    throw std::invalid_argument("a run of elements needs the addresses of param, grad, exp_avg and exp_avg_sq");
  }
  return {scalars, numel,           floats(param),      floats(grad),
          floats(exp_avg), floats(exp_avg_sq), floats(max_exp_avg_sq)};
}

void adam_step(const std::vector<AdamRun>& runs, const std::string& isa) {
  const Kernels& kernels = table(isa);
  const py::gil_scoped_release unlocked;
  for (const AdamRun& run : runs) kernels.adam(run);
}

void fma_array(std::int64_t numel, std::uintptr_t a, std::uintptr_t b, std::uintptr_t c, std::uintptr_t out,
         const std::string& isa) {
  const Kernels& kernels = table(isa);
  const py::gil_scoped_release unlocked;
  kernels.fma({numel, floats(a), floats(b), floats(c), floats(out)});
}

void mean(std::int64_t numel, const std::string& dtype, const std::vector<std::uintptr_t>& sources,
          std::uintptr_t out, const std::string& isa) {
  if (sources.size() < 2) throw std::invalid_argument("a mean needs the chunks of two ranks or more");
  std::vector<const void*> chunks;
  for (const std::uintptr_t source : sources) chunks.push_back(reinterpret_cast<const void*>(source));
  const zero_opt::MeanRun run = {numel, static_cast<std::int32_t>(chunks.size()), chunks.data(),
                                 reinterpret_cast<void*>(out)};
  const zero_opt::MeanKernels& kernels = zero_opt::mean_kernels(table(isa));
  if (dtype != "float32" && dtype != "bfloat16") throw std::invalid_argument("no mean kernel for " + dtype);
  const py::gil_scoped_release unlocked;
  (dtype == "float32" ? kernels.float32 : kernels.bfloat16)(run);
}

zero_opt::PeerWords& words(std::uintptr_t address) { return *reinterpret_cast<zero_opt::PeerWords*>(address); }

void publish(std::uintptr_t address, int slot, std::uint64_t ident) {
  if (slot != 0 && slot != 1) throw std::invalid_argument("there are two slots, got " + std::to_string(slot));
  zero_opt::publish(words(address), slot, ident);
}

int wait_staged(std::uintptr_t address, std::uint64_t ident, double timeout_s) {
  const py::gil_scoped_release unlocked;
  return static_cast<int>(zero_opt::wait_staged(words(address), ident, timeout_s));
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : zero_opt::available_kernels()) names.emplace_back(kernels->name);
  return names;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native kernels of zero_opt. Addresses and sizes go in unchecked: call zero_opt.cpu_adam instead.";
  py::class_<AdamScalars>(m, "AdamScalars")
      .def(py::init(&make_scalars), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"), py::arg("step"), py::arg("decoupled"),
           py::arg("maximize"));
  py::class_<AdamRun>(m, "AdamRun")
      .def(py::init(&make_run), py::arg("scalars"), py::arg("numel"), py::arg("param"), py::arg("grad"),
           py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("max_exp_avg_sq") = 0);
  m.def("adam_step", &adam_step, py::arg("runs"), py::arg("isa") = "");
  m.def("fma", &fma_array, py::arg("numel"), py::arg("a"), py::arg("b"), py::arg("c"), py::arg("out"),
        py::arg("isa") = "");
  m.def("mean", &mean, py::arg("numel"), py::arg("dtype"), py::arg("sources"), py::arg("out"), py::arg("isa") = "");
  m.def("publish", &publish, py::arg("words"), py::arg("slot"), py::arg("ident"));
  m.def("wait_staged", &wait_staged, py::arg("words"), py::arg("ident"), py::arg("timeout_s"));
  m.def("isas", &isas);
  m.def("isa", []() { return std::string(zero_opt::chosen_kernels().name); });
}
