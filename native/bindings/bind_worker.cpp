// Both sides of a worker: the trainer's control area, and the worker's life.
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/bindings.hpp"
#include "worker/control.hpp"
#include "worker/control_block.hpp"
#include "worker/worker.hpp"

namespace zero_opt::bindings {
namespace {

Control make_control(std::uintptr_t address, std::size_t nbytes, std::size_t lanes, std::size_t max_runs) {
  return Control(reinterpret_cast<char*>(address), nbytes, lanes, max_runs);
}

std::uint64_t submit(Control& control, const std::vector<Batch>& batches, int wake_fd, bool flush_denormals,
                     bool past_caches, const std::string& isa) {
  const std::string name = table(isa).name;
  const std::vector<UpdateBatch> work = with_grads(batches);
  const py::gil_scoped_release unlocked;
  return control.submit(work, wake_fd, flush_denormals, past_caches, name);
}

std::uint64_t draft(Control& control, const std::vector<Batch>& batches, int wake_fd, bool flush_denormals,
                    const std::string& isa) {
  const std::string name = table(isa).name;
  const std::vector<UpdateBatch> work = with_grads(batches);
  const py::gil_scoped_release unlocked;
  return control.draft(work, wake_fd, flush_denormals, name);
}

std::uint64_t draft_sums(Control& control, const std::vector<Grad>& grads, const std::vector<std::uintptr_t>& squares,
                         int wake_fd, bool flush_denormals, const std::string& isa) {
  const std::string name = table(isa).name;
  const std::vector<GradArray> arrays = make_grads(grads, squares);
  for (const GradArray& grad : arrays) {
    if (grad.numel > 0 && (grad.data == nullptr || grad.squares == nullptr)) {
      throw std::invalid_argument("a gradient, or its sums, without an address");
    }
  }
  const py::gil_scoped_release unlocked;
  return control.draft_sums(arrays, wake_fd, flush_denormals, name);
}

template <Waited (Control::*wait)(std::uint64_t, int, int, double)>
const char* wait_for(Control& control, std::uint64_t value, int done_fd, int worker_pidfd, double seconds) {
  const py::gil_scoped_release unlocked;
  const Waited found = (control.*wait)(value, done_fd, worker_pidfd, seconds);
  if (found == Waited::kDone) return "done";
  return found == Waited::kDead ? "dead" : "waiting";
}

void worker_run(int arena_fd, int wake_fd, int done_fd, int trainer_pidfd, const std::vector<int>& cpus, int threads) {
  const py::gil_scoped_release unlocked;
  zero_opt::worker_run({arena_fd, wake_fd, done_fd, trainer_pidfd}, cpus, threads);
}

std::size_t control_nbytes(std::size_t lanes, std::size_t max_runs) {
  return ControlLayout(lanes, max_runs).bytes;
}

}  // namespace

void bind_worker(py::module_& m) {
  py::class_<Control>(m, "Control")
      .def(py::init(&make_control), py::arg("address"), py::arg("nbytes"), py::kw_only(), py::arg("lanes"),
           py::arg("max_runs"))
      .def("submit", &submit, py::arg("batches"), py::arg("wake_fd"), py::kw_only(),
           py::arg("flush_denormals") = false, py::arg("past_caches") = false, py::arg("isa") = "")
      .def("wait", &wait_for<&Control::wait>, py::arg("sequence"), py::arg("done_fd"), py::arg("worker_pidfd"),
           py::arg("seconds"))
      .def("draft", &draft, py::arg("batches"), py::arg("wake_fd"), py::kw_only(),
           py::arg("flush_denormals") = false, py::arg("isa") = "")
      .def("draft_sums", &draft_sums, py::arg("grads"), py::arg("squares"), py::arg("wake_fd"), py::kw_only(),
           py::arg("flush_denormals") = false, py::arg("isa") = "")
      .def("void_drafts", &Control::void_drafts)
      .def("wait_drafts", &wait_for<&Control::wait_drafts>, py::arg("drafts"), py::arg("done_fd"),
           py::arg("worker_pidfd"), py::arg("seconds"))
      .def("stop", &Control::stop, py::arg("wake_fd"))
      .def("finish", &Control::finish, py::arg("threads") = 1, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("submitted", &Control::submitted)
      .def_property_readonly("completed", &Control::completed)
      .def_property_readonly("drafted", &Control::drafted)
      .def_property_readonly("drafts_done", &Control::drafts_done)
      .def_property_readonly("generation", &Control::generation)
      .def_property_readonly("nonfinite", &Control::nonfinite)
      .def_property_readonly("step_seconds", &Control::step_seconds)
      .def_property_readonly("error", &Control::error)
      .def_property_readonly("progress", [](const Control& control) { return py::tuple(py::cast(control.progress())); });
  m.def("control_nbytes", &control_nbytes, py::arg("lanes"), py::arg("max_runs"));
  m.def("worker_run", &worker_run, py::arg("arena_fd"), py::arg("wake_fd"), py::arg("done_fd"),
        py::arg("trainer_pidfd"), py::arg("cpus"), py::arg("threads"));
}

}  // namespace zero_opt::bindings
