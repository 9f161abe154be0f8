// A step, the sums of its gradients, and copies.
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/bindings.hpp"
#include "step/step.hpp"

namespace zero_opt::bindings {
namespace {

Hypers hypers_of(const std::string& update, bool maximize, double grad_scale, double prediction,
                 const py::kwargs& values) {
  Hypers hypers = make_hypers(update, values.cast<std::map<std::string, double>>());
  hypers.maximize = maximize;
  hypers.grad_scale = grad_scale;
  hypers.prediction = prediction;
  return hypers;
}

using Addresses = std::map<std::string, std::uintptr_t>;

void check_addresses(std::int64_t numel, const Addresses& addresses, Format moments) {
  static const std::set<std::string> known = [] {
    std::set<std::string> roles = {"param", "out", "remainder", "exp_avg_base", "exp_avg_sq_base", "step"};
    for (int number = 0; number < 3; ++number) {
      for (const std::string& name : names_of_array(number)) roles.insert(name);
    }
    return roles;
  }();
  if (numel < 0) throw std::invalid_argument("numel must not be negative, got " + std::to_string(numel));
  for (const auto& [role, address] : addresses) {
    if (known.count(role) == 0) throw std::invalid_argument("no array of a run is called '" + role + "'");
  }
  std::vector<std::string> needed = {"param"};
  if (moments == Format::kBlock8) needed.insert(needed.end(), {"exp_avg_base", "exp_avg_sq_base"});
  for (const std::string& role : needed) {
    const auto found = addresses.find(role);
    if (numel > 0 && (found == addresses.end() || found->second == 0)) {
      throw std::invalid_argument("a run of elements needs the address of " + role);
    }
  }
}

void* array_at(const Addresses& addresses, const char* role) {
  const auto found = addresses.find(role);
  return found == addresses.end() ? nullptr : memory(found->second);
}

// An array of state, by any of its names.
void* state_at(const Addresses& addresses, int number) {
  static const std::vector<std::string> names[] = {names_of_array(0), names_of_array(1), names_of_array(2)};
  for (const std::string& name : names[number]) {
    if (void* found = array_at(addresses, name.c_str())) return found;
  }
  return nullptr;
}

StateArrays arrays_at(const Addresses& addresses) {
  return {array_at(addresses, "param"),
          static_cast<std::int16_t*>(array_at(addresses, "remainder")),
          state_at(addresses, 0),
          state_at(addresses, 1),
          static_cast<std::uint16_t*>(array_at(addresses, "exp_avg_base")),
          static_cast<std::uint16_t*>(array_at(addresses, "exp_avg_sq_base")),
          static_cast<float*>(state_at(addresses, 2))};
}

// Where a run is written, if not where it is read.
StateArrays written_at(std::int64_t numel, const Addresses& addresses, const Addresses& to, Format moments) {
  if (to.empty()) return arrays_at(addresses);
  check_addresses(numel, to, moments);
  const auto roles = [](const Addresses& given) {
    std::set<std::string> found;
    for (const auto& [role, address] : given) {
      if (address != 0 && role != "out" && role != "step") found.insert(role);
    }
    return found;
  };
  if (roles(addresses) != roles(to)) {
    throw std::invalid_argument("a run must be read and written with the same arrays of state");
  }
  if (array_at(to, "out") != nullptr || array_at(to, "step") != nullptr) {
    throw std::invalid_argument("out and step are not state that is written elsewhere");
  }
  return arrays_at(to);
}

CountedRun make_run(std::int64_t numel, const Addresses& addresses, const std::string& grad_dtype,
                    const std::string& moment_dtype, const std::string& out_dtype, double step, const Addresses& to) {
  const Format moments = format_named(moment_dtype);
  check_addresses(numel, addresses, moments);
  if (moments == Format::kFloat16) throw std::invalid_argument("exp_avg_sq does not fit the range of float16");
  const auto at = [&](const char* role) { return array_at(addresses, role); };
  if (at("step") == nullptr && !(step >= 1.0)) {
    throw std::invalid_argument("step counts from 1, got " + std::to_string(step));
  }
  UpdateRun run = {};
  run.numel = numel;
  run.from = arrays_at(addresses);
  run.to = written_at(numel, addresses, to, moments);
  run.out = at("out");
  run.grad_format = float_named(grad_dtype);
  run.moment_format = moments;
  run.out_format = float_named(out_dtype);
  return {run, step, static_cast<float*>(at("step"))};
}

std::int64_t update_step(const std::vector<Batch>& batches, int threads, bool flush_denormals,
                       const std::string& isa) {
  const Kernels& kernels = table(isa);
  const std::vector<UpdateBatch> work = with_grads(batches);
  const py::gil_scoped_release unlocked;
  return zero_opt::update_step(kernels, work, {threads, flush_denormals});
}

std::pair<double, std::int64_t> grad_sum(const std::vector<Grad>& grads, const std::vector<std::uintptr_t>& squares,
                                         int threads, bool flush_denormals, const std::string& isa) {
  const Kernels& kernels = table(isa);
  const std::vector<GradArray> arrays = make_grads(grads, squares);
  const py::gil_scoped_release unlocked;
  const GradSum sum = zero_opt::grad_sum(kernels, arrays, {threads, flush_denormals});
  return {sum.squares, sum.nonfinite};
}

void copy_runs(const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::int64_t>>& runs,
               const std::vector<std::pair<std::uintptr_t, std::string>>& squares, int threads,
               const std::string& isa) {
  const Kernels& kernels = table(isa);
  if (!squares.empty() && squares.size() != runs.size()) {
    throw std::invalid_argument("either all runs or none have a place for sums");
  }
  std::vector<CopyRun> copies;
  for (const auto& [to, from, bytes] : runs) {
    if (bytes < 0) throw std::invalid_argument("bytes must not be negative, got " + std::to_string(bytes));
    CopyRun copy = {memory(to), memory(from), bytes, Format::kFloat32, nullptr};
    if (!squares.empty()) {
      copy.format = float_named(squares[copies.size()].second);
      copy.squares = static_cast<double*>(memory(squares[copies.size()].first));
    }
    copies.push_back(copy);
  }
  const py::gil_scoped_release unlocked;
  zero_opt::copy_runs(kernels, copies, threads);
}

}  // namespace

void bind_step(py::module_& m) {
  py::class_<Hypers>(m, "Hypers")
      .def(py::init(&hypers_of), py::arg("update"), py::kw_only(), py::arg("maximize") = false,
           py::arg("grad_scale") = 1.0, py::arg("prediction") = 0.0);
  py::class_<CountedRun>(m, "UpdateRun")
      .def(py::init(&make_run), py::arg("numel"), py::arg("addresses"), py::kw_only(),
           py::arg("grad_dtype") = "float32", py::arg("moment_dtype") = "float32",
           py::arg("out_dtype") = "float32", py::arg("step") = 1.0, py::arg("to") = Addresses());
  m.def("update_step", &update_step, py::arg("batches"), py::kw_only(), py::arg("threads") = 1,
        py::arg("flush_denormals") = false, py::arg("isa") = "");
  m.def("grad_sum", &grad_sum, py::arg("grads"), py::arg("squares") = std::vector<std::uintptr_t>(), py::kw_only(),
        py::arg("threads") = 1, py::arg("flush_denormals") = false, py::arg("isa") = "");
  m.def("copy_runs", &copy_runs, py::arg("runs"),
        py::arg("squares") = std::vector<std::pair<std::uintptr_t, std::string>>(), py::kw_only(),
        py::arg("threads") = 1, py::arg("isa") = "");
}

}  // namespace zero_opt::bindings
