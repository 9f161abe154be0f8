// A simulated accelerator on PrivateUse1: device memory that the host cannot touch, streams that are threads
// with random delays, a caching allocator that poisons, a communicator with NCCL's semantics, and a check
// that whatever shares memory is ordered.
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>

#include "comm_backend.hpp"
#include "sparse.hpp"

namespace sim {

// Autograd starts its threads once, at the first backward in any process that this one was forked from. That
// may have been before there were devices.
struct Engine : torch::autograd::Engine {
  static void start_threads() {
    pybind11::gil_scoped_release release;
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.initialize_device_threads_pool();
    if ((engine.*&Engine::device_ready_queues_).empty()) (engine.*&Engine::start_device_threads)();
  }
};

// A forked process has none of its parent's streams: what was to run on them has run, or never will.
inline std::vector<HostCopyPtr>& left_behind() {
  static auto* all = new std::vector<HostCopyPtr>;
  return *all;
}
inline void before_fork() { world().lock(); }
inline void after_fork_in_parent() { world().unlock(); }
inline void after_fork_in_child() {
  generation++;
  streams().clear();
  accesses().clear();
  host_clock() = {};
  race_reports().clear();
  HostCopies::one().forked(left_behind());
  allocator().forked();
  for (auto& one : context) one = false;
  current_device = 0;
  for (auto& one : current_stream) one = 0;
  world().unlock();
}

void enable() {
  if (enabled.exchange(true)) return;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  observe_host();
}
void set_delays(int main, int side, int comm, int new_seed) {
  Locked lock(world());
  delay_default = main, delay_side = side, delay_comm = comm, seed = new_seed;
  for (auto& [key, stream] : streams()) stream->reseed();
}
std::vector<std::string> take_races() {
  Locked lock(world());
  return std::exchange(race_reports(), {});
}
void synchronize_all() {
  std::vector<MarkPtr> marks;
  {
    Locked lock(world());
    for (auto& [key, stream] : streams()) marks.push_back(stream->mark());
  }
  for (auto& mark : marks) host_wait(mark);
}
void stop() {  // at exit, once the streams had a second to end
  for (int i = 0; i < 100; i++) {
    bool idle = true;
    {
      Locked lock(world());
      for (auto& [key, stream] : streams()) idle &= stream->idle();
    }
    if (idle) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ending = true;
}
void set_pinned(std::optional<bool> all) {
  pinned = !all ? Pinned::kAllocated : *all ? Pinned::kAll : Pinned::kNone;
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  sim::map_memory();
  c10::SetAllocator(sim::kType, &sim::allocator());
  pthread_atfork(sim::before_fork, sim::after_fork_in_parent, sim::after_fork_in_child);
  auto backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<sim::Comm, c10::intrusive_ptr<sim::Comm>>(m, "Comm", backend)
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>())
      .def_property_readonly("options", &sim::Comm::getBackendOptions);
  m.attr("device_type") = static_cast<int>(sim::kType);
  m.def("enable", sim::enable);
  m.def("start_autograd", sim::Engine::start_threads);
  m.def("stop", sim::stop, py::call_guard<py::gil_scoped_release>());
  m.def("label", [](const std::string& text) { sim::label = text.empty() ? "" : " [" + text + "]"; });
  m.def("trace", [](bool on) { sim::tracing = on; });
  m.def("delays", sim::set_delays, py::arg("main"), py::arg("side"), py::arg("comm"), py::arg("seed"));
  m.def("pinned", sim::set_pinned);
  m.def("races", sim::take_races);
  m.def("launches", [] { return sim::launches.load(); });
  m.def("delayed", [] { return sim::delayed.load(); });
  m.def("live_bytes", [] { return sim::allocator().live(); });
  m.def("contexts", [] { return std::vector<bool>(std::begin(sim::context), std::end(sim::context)); });
  m.def("synchronize", sim::synchronize_all, py::call_guard<py::gil_scoped_release>());
  m.def("device_count", [] { return int(sim::Guard().deviceCount()); });
  m.def("current_device", [] { return sim::current_device; });
  m.def("set_device", [](int device) { sim::Guard().setDevice({sim::kType, c10::DeviceIndex(device)}); });
  m.def("exchange_device", [](int device) {
    return int(sim::Guard().exchangeDevice({sim::kType, c10::DeviceIndex(device)}).index());
  });
  m.def("restore_device", [](int device) { sim::current_device = device; });
}
