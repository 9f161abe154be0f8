// Streams: threads that run what is launched on them, in order, now and then after a random delay.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "clocks.hpp"

namespace sim {
using at::Tensor;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2, kStreams = 33;  // a default stream and a pool of 32, as CUDA has
constexpr int64_t kFirstOfComms = 1000;     // the number of the first communicator's stream

inline std::atomic<bool> enabled{false};
inline std::atomic<bool> ending{false};  // the process exits: streams stand still
inline std::atomic<int> generation{0};   // forks that led to this process
inline std::atomic<int> delay_default{0}, delay_side{0},
    delay_comm{0};  // microseconds at most, before each kernel
inline std::atomic<int> seed{0};
inline std::atomic<int64_t> launches{0}, delayed{0};  // the latter in microseconds
inline thread_local int quiet = 0;  // the host's accesses to host memory are the simulation's own
inline thread_local int current_device = 0;
inline thread_local int64_t current_stream[kDevices] = {};
inline std::atomic<bool> context[kDevices] = {};

// What a thread adds to the names of the kernels that it launches: a label, and the line of Python.
inline thread_local std::string label, origin;
inline std::atomic<bool> tracing{false};

struct Quiet {
  Quiet() { quiet++; }
  ~Quiet() { quiet--; }
};

// The line of Python that calls an operator, while traced. Constructed where no lock is held.
struct Origin {
  Origin() {
    if (tracing && origin.empty() && Py_IsInitialized()) origin = line(), outermost_ = true;
  }
  ~Origin() {
    if (outermost_) origin.clear();
  }

 private:
  static std::string line() {
    pybind11::gil_scoped_acquire gil;
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    std::string found;
    while (frame) {
      auto code =
          pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
      auto file = code.attr("co_filename").cast<std::string>();
      if (file.find("/torch/") == std::string::npos)
        found = " at " + file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      PyFrameObject* back = found.empty() ? PyFrame_GetBack(frame) : nullptr;
      Py_DECREF(frame);
      frame = back;
    }
    return found;
  }
  bool outermost_ = false;
};

struct Failure {  // of a kernel: as on a GPU, all that comes later fails too
  std::mutex mutex;
  std::string text;
  static Failure& one() {
    static auto* it = new Failure;
    return *it;
  }
  void set(const std::string& what) {
    std::lock_guard lock(mutex);
    if (text.empty()) text = what;
  }
  void check() {
    std::lock_guard lock(mutex);
    TORCH_CHECK(text.empty(), "sim: a kernel failed: ", text);
  }
};

// A point of a stream, and what is ordered before it.
struct Mark {
  const Clock clock;
  const int of_generation = generation;
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  std::chrono::steady_clock::time_point when;
  explicit Mark(Clock clock) : clock(std::move(clock)) {}
  void reach() {
    std::lock_guard lock(mutex);
    reached = true, when = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  bool stale() const {
    return of_generation != generation;
  }  // its stream stayed behind in the parent process
  void wait() {
    if (stale()) return;  // its mutex may have been locked when the process forked
    std::unique_lock lock(mutex);
    while (!reached && !ending) changed.wait_for(lock, std::chrono::milliseconds(100));
  }
  bool is_reached() {
    if (stale()) return true;
    std::lock_guard lock(mutex);
    return reached;
  }
};
using MarkPtr = std::shared_ptr<Mark>;

// One stream. Its clock, and all calls but of the thread itself, are under world().
class Stream {
 public:
  const int device, agent;
  const int64_t id;
  Clock clock;

  Stream(int device, int64_t id)
      : device(device), agent(new_agent(name_of(device, id))), id(id), delay_(delay_of(id)) {
    reseed();
    std::thread([this] { run(); }).detach();
  }
  void reseed() { random_.seed(seed * 1000 + device * 100 + int(id)); }
  // Launch a kernel: the check of what it uses, then its place in the queue.
  void launch(const std::string& name, const Uses& uses, std::function<void()> call) {
    launches++;
    note(name, uses);
    int most = delay_->load();
    if (int us = most && random_() % 3 == 0 ? int(random_() % most) : 0)  // now and then
      delayed += us, add([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
    add(std::move(call));
  }
  // Tick and check as for a kernel, with nothing to run.
  Access note(const std::string& name, const Uses& uses) {
    clock.merge(host_clock());
    Access access{agent, clock.tick(agent), interned(name + label + origin)};
    accesses().add(access, uses, clock);
    return access;
  }
  MarkPtr mark() {
    clock.merge(host_clock());
    auto made = std::make_shared<Mark>(clock);
    add([made] { made->reach(); });
    return made;
  }
  void await(const MarkPtr& point) {
    clock.merge(host_clock());
    clock.merge(point->clock);
    add([point] { point->wait(); });
  }
  void add(std::function<void()> call) {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(call));
    changed_.notify_one();
  }
  bool idle() {
    std::lock_guard lock(mutex_);
    return queue_.empty() && !busy_;
  }
  void close() {  // its thread leaves once it has run what is queued
    add(nullptr);
  }

 private:
  static std::string name_of(int device, int64_t id) {
    std::string on = "sim:" + std::to_string(device);
    if (id == 0) return "the default stream of " + on;
    if (id >= kFirstOfComms)
      return "the stream of communicator " + std::to_string(id - kFirstOfComms) + " on " + on;
    return "stream " + std::to_string(id) + " of " + on;
  }
  static std::atomic<int>* delay_of(int64_t id) {
    return id == 0 ? &delay_default : id >= kFirstOfComms ? &delay_comm : &delay_side;
  }
  void run() {
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    at::set_num_threads(1);
    quiet = 1;
    while (true) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty() && !ending; });
        next = std::move(queue_.front());
        queue_.pop_front();
        busy_ = bool(next);
      }
      if (!next) return;
      try {
        next();
      } catch (const std::exception& error) {
        fprintf(stderr, "sim: a kernel failed: %s\n", error.what());
        Failure::one().set(error.what());
      }
      next = nullptr;
      std::lock_guard lock(mutex_);
      busy_ = false;
    }
  }

  std::deque<std::function<void()>> queue_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool busy_ = false;
  std::atomic<int>* delay_;
  std::mt19937 random_;
};

using Streams = std::map<std::pair<int, int64_t>, Stream*>;
inline Streams&
streams() {  // under world(); streams are never destroyed, for their threads may outlive all else
  static auto* all = new Streams;
  return *all;
}
inline Stream& stream_of(int device, int64_t id) {
  context[device] = true;
  auto& found = streams()[{device, id}];
  if (!found) found = new Stream(device, id);
  return *found;
}
inline Stream& here(c10::Device device) { return stream_of(device.index(), current_stream[device.index()]); }

void host_knows(const Clock& clock);

// Have this host thread wait for a point; everything launched later, by any thread, is ordered after it.
inline void host_wait(const MarkPtr& point) {
  {
    std::unique_ptr<pybind11::gil_scoped_release>
        release;  // kernels may drop the last reference to an object
    if (Py_IsInitialized() && PyGILState_Check()) release = std::make_unique<pybind11::gil_scoped_release>();
    point->wait();
    host_knows(point->clock);
  }
  Failure::one().check();
}
inline bool host_asks(const MarkPtr& point) {
  if (!point->is_reached()) return false;
  host_knows(point->clock);
  return true;
}
inline void synchronize(c10::Device device, int64_t id) {
  MarkPtr mark;
  {
    Locked lock(world());
    mark = stream_of(device.index(), id).mark();
  }
  host_wait(mark);
}

}  // namespace sim
