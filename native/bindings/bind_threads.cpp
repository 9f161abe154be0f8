// How many threads there may be, their mode, their end, and the pages of their arrays.
#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "threads/flush_denormals.hpp"
#include "threads/held_threads.hpp"
#include "threads/huge_pages.hpp"
#include "threads/thread_pool.hpp"

namespace zero_opt::bindings {

void bind_threads(py::module_& m) {
  m.def("prefer_huge_pages", &prefer_huge_pages, py::arg("address"), py::arg("nbytes"));
  m.def("usable_threads", &usable_threads, py::arg("requested"));
  m.def("hold_threads", &hold_threads, py::arg("threads"));
  m.def("flushes_denormals", &FlushDenormals::own);
  m.def("cgroup_cpus", &cgroup_cpus, py::arg("listing"), py::arg("root"));
}

}  // namespace zero_opt::bindings
