// The parts of the module: each adds the names of one folder. No other folder knows pybind11.
#pragma once

#include <pybind11/pybind11.h>

namespace zero_opt::bindings {

namespace py = pybind11;

void bind_kernels(py::module_& m);
void bind_threads(py::module_& m);
void bind_step(py::module_& m);
void bind_exchange(py::module_& m);
void bind_worker(py::module_& m);
void bind_many(py::module_& m);
void bind_arrivals(py::module_& m);

}  // namespace zero_opt::bindings
