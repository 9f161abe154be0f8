#include "worker/worker.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "threads/huge_pages.hpp"
#include "threads/thread_pool.hpp"
#include "worker/control_block.hpp"
#include "worker/draft_queue.hpp"
#include "worker/logged_step.hpp"

#if defined(__linux__)
#include <sys/prctl.h>
#endif

namespace zero_opt {
namespace {

using Clock = std::chrono::steady_clock;

// No wait is longer, so that a lost wake-up costs no more than this.
constexpr int kSliceMs = 1000;
// The next step is often submitted sooner than a sleeper is woken.
constexpr auto kSpin = std::chrono::microseconds(5);
// After a wait that the kernel has refused, as for lack of memory.
constexpr auto kRetry = std::chrono::milliseconds(1);
// How long a predecessor may take to die.
constexpr auto kPredecessor = std::chrono::seconds(10);

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }

// All but what the processor raises, on this thread and those that it starts.
void block_signals() {
  sigset_t set;
  sigfillset(&set);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&set, fault);
  pthread_sigmask(SIG_SETMASK, &set, nullptr);
}

void unblock(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) fail("an event of the worker");
}

// Ends the process with the trainer, in mid-step too. The kernel does when the thread that started this process ends,
// which works on a stopped one; the pidfd does where that cannot be had.
void watch(int trainer_pidfd) {
#if defined(__linux__)
  prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
  std::thread([trainer_pidfd] {
    for (;;) {
      pollfd trainer = {trainer_pidfd, POLLIN, 0};
      const int ready = poll(&trainer, 1, kSliceMs);
      if (ready > 0) _exit(0);
      if (ready < 0) std::this_thread::sleep_for(kRetry);
    }
  }).detach();
}

// Record locks are the process's own and end after its last thread: whoever has it is alone with the arena.
void lock_arena(int fd) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  const auto deadline = Clock::now() + kPredecessor;
  while (fcntl(fd, F_SETLK, &lock) != 0) {
    if (errno != EAGAIN && errno != EACCES) fail("the arena's lock");
    if (Clock::now() > deadline) throw std::runtime_error("another worker still has the arena");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

char* mapped(int fd, std::size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("the arena cannot be mapped");
  return static_cast<char*>(base);
}

std::size_t size_of(int fd) {
  struct stat file;
  if (fstat(fd, &file) != 0) fail("the arena");
  return static_cast<std::size_t>(file.st_size);
}

// Takes the pages of some memory, without changing what is in them.
bool populate(char* begin, std::size_t bytes) {
  prefer_huge_pages(reinterpret_cast<std::uintptr_t>(begin), bytes);
#if defined(MADV_POPULATE_WRITE)
  if (madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
#endif
  for (std::size_t at = 0; at < bytes; at += ControlLayout::kPage) {
    reinterpret_cast<std::atomic<unsigned char>*>(begin + at)->fetch_or(0, std::memory_order_relaxed);
  }
  return true;
}

class Worker {
 public:
  Worker(const WorkerFiles& files, int threads)
      : files_(files),
        threads_(threads),
        bytes_(size_of(files.arena)),
        base_(mapped(files.arena, bytes_)),
        view_(base_, static_cast<std::size_t>(control().lanes), static_cast<std::size_t>(control().max_runs)) {
    const ControlBlock& block = control();
    if (block.magic != kControlMagic || block.version != kControlVersion || block.log_numel != kLogNumel ||
        block.control_bytes != view_.control_bytes()) {
      throw std::runtime_error("the arena's control area was not made for this worker");
    }
  }

  [[noreturn]] void serve() {
    ControlBlock& block = control();
    block.stop.store(0, std::memory_order_relaxed);
    block.error_bytes.store(0, std::memory_order_release);
    touch();
    for (bool ready = false;; ready = true) {
      const std::uint64_t sequence = block.submitted.load(std::memory_order_acquire);
      const std::uint64_t drafted = block.drafted.load(std::memory_order_acquire);
      finish_step(view_, bytes_, threads_);
      finish_drafts(view_, bytes_, threads_);
      if (!ready) block.generation.fetch_add(1, std::memory_order_release);
      ring();
      if (block.stop.load(std::memory_order_acquire) != 0) _exit(0);
      sleep(sequence, drafted);
    }
  }

  void say(const char* text) {
    ControlBlock& block = control();
    const std::size_t bytes = std::min(std::strlen(text), kErrorBytes);
    std::memcpy(block.error, text, bytes);
    block.error_bytes.store(bytes, std::memory_order_release);
    ring();
  }

 private:
  ControlBlock& control() const { return *reinterpret_cast<ControlBlock*>(base_); }

  // Every thread takes the pages of its own part, so that they are near to it.
  void touch() {
    const std::size_t first = std::max<std::size_t>(control().touched.load(), view_.control_bytes());
    if (first >= bytes_) return;
    const std::size_t pages = (bytes_ - first) / ControlLayout::kPage;
    std::atomic<bool> all{true};
    run_parallel(threads_, [&](int thread) {
      const auto edge = [&](std::size_t i) { return first + pages * i / threads_ * ControlLayout::kPage; };
      const std::size_t begin = edge(thread), end = edge(thread + 1);
      if (begin < end && !populate(base_ + begin, end - begin)) all = false;
    });
    if (!all) throw std::runtime_error("there is no memory for the " + std::to_string(bytes_) + " bytes of the arena");
    control().touched.store(bytes_, std::memory_order_release);
  }

  void ring() const {
    const std::uint64_t one = 1;
    (void)!write(files_.done, &one, sizeof(one));  // a full counter has woken the trainer already
  }

  // Until there is something to do, or a while.
  void sleep(std::uint64_t sequence, std::uint64_t drafted) const {
    const auto begin = Clock::now();
    const auto idle = [&] {
      return control().submitted.load(std::memory_order_acquire) == sequence &&
             control().drafted.load(std::memory_order_acquire) == drafted &&
             control().stop.load(std::memory_order_acquire) == 0;
    };
    while (idle()) {
      if (Clock::now() - begin < kSpin) continue;
      pollfd wake = {files_.wake, POLLIN, 0};
      if (poll(&wake, 1, kSliceMs) < 0) std::this_thread::sleep_for(kRetry);
      std::uint64_t rung;
      (void)!read(files_.wake, &rung, sizeof(rung));
    }
  }

  WorkerFiles files_;
  int threads_;
  std::size_t bytes_;
  char* base_;
  ArenaView view_;
};

}  // namespace

void worker_run(const WorkerFiles& files, const std::vector<int>& cpus, int threads) {
  block_signals();
  watch(files.trainer_pidfd);
  Worker* worker = nullptr;
  try {
    unblock(files.wake);
    unblock(files.done);
    if (!cpus.empty() && (errno = set_cpus(pthread_self(), cpus)) != 0) fail("the worker's CPUs");
    lock_arena(files.arena);
    worker = new Worker(files, threads);
    worker->serve();
  } catch (const std::exception& error) {
    if (worker != nullptr) worker->say(error.what());
    dprintf(STDERR_FILENO, "zero_opt worker: %s\n", error.what());
    _exit(1);
  }
}

}  // namespace zero_opt
