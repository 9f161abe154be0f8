// The Python face of the kernels; the only file that knows pybind11. Tensors arrive as raw addresses,
// checked by zero_opt/cpu_adam.py, so that one binary serves every version of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.hpp"

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
  m.def("isas", &isas);
  m.def("isa", []() { return std::string(zero_opt::chosen_kernels().name); });
}
