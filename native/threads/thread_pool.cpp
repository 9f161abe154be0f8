#include "threads/thread_pool.hpp"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zero_opt {
namespace {

// The CPUs that the calling thread may run on; empty where that cannot be known.
std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  for (int limit = 1024; limit <= (1 << 16) && cpus.empty(); limit *= 4) {  // a larger machine needs a larger mask
    cpu_set_t* mask = CPU_ALLOC(limit);
    if (mask == nullptr) break;
    const std::size_t size = CPU_ALLOC_SIZE(limit);
    CPU_ZERO_S(size, mask);
    if (sched_getaffinity(0, size, mask) == 0) {
      for (int cpu = 0; cpu < limit; ++cpu) {
        if (CPU_ISSET_S(cpu, size, mask)) cpus.push_back(cpu);
      }
    }
    CPU_FREE(mask);
  }
#endif
  return cpus;
}

// CPUs' worth of time that one cgroup folder grants; infinite without a limit. v2: "max 100000" or "150000 100000".
double quota_of(const std::string& folder) {
  std::string quota;
  double period = 0;
  if (std::ifstream file(folder + "/cpu.max"); file >> quota >> period && quota != "max") {
    return std::strtod(quota.c_str(), nullptr) / period;
  }
  double granted = 0;
  std::ifstream first(folder + "/cpu.cfs_quota_us"), second(folder + "/cpu.cfs_period_us");
  if (first >> granted && second >> period && granted > 0) return granted / period;
  return std::numeric_limits<double>::infinity();
}

// While it lives, threads that this one starts leave all signals to the others.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t saved_;
};

// How often the caller looks whether the others are done before it sleeps: for 1 to 50 us, by the processor. To be woken
// takes about 20.
constexpr int kSpins = 1000;

inline void relax() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // Grows to ``count`` threads if it can, and follows a change of the CPUs that the process may use.
  // Returns how many threads there are, at most ``count``.
  int prepare(int count) {
    try {
      const SignalsBlocked blocked;
      while (static_cast<int>(threads_.size()) < count) {
        const int index = static_cast<int>(threads_.size());
        threads_.emplace_back([this, index] { serve(index); });
        placed_.clear();
      }
    } catch (const std::system_error&) {
      // Out of threads: make do with those there are.
    }
    const std::vector<int> cpus = allowed_cpus();
    if (cpus != placed_ && !cpus.empty()) place(cpus);
    return std::min(count, static_cast<int>(threads_.size()));
  }

  // The caller works too, in the place of one of the threads, which is woken with the others and sleeps on.
  void run(int count, const std::function<void(int)>& task) noexcept {
    const int own = place_of_caller(count);
    std::unique_lock<std::mutex> lock(mutex_);
    task_ = &task;
    active_ = count;
    absent_ = own;
    pending_ = count - 1;
    ++generation_;
    lock.unlock();
    start_.notify_all();
    task(own);
    for (int i = 0; i < kSpins && pending_.load(std::memory_order_acquire) > 0; ++i) relax();
    lock.lock();
    done_.wait(lock, [this] { return pending_ == 0; });
  }

 private:
  void place(const std::vector<int>& cpus) {
    const bool one_each = threads_.size() == cpus.size();
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      // A CPU may have gone since: then the thread runs where it is.
      set_cpus(threads_[i].native_handle(), one_each ? std::vector<int>{cpus[i]} : cpus);
    }
    placed_ = cpus;
    pinned_ = one_each;
  }

  // Which thread the caller stands in for: the one that is pinned where the caller runs, so that none has to move.
  int place_of_caller(int count) const {
#if defined(__linux__)
    const auto at = std::find(placed_.begin(), placed_.end(), pinned_ ? sched_getcpu() : -1);
    if (at != placed_.end() && at - placed_.begin() < count) return static_cast<int>(at - placed_.begin());
#endif
    return 0;
  }

  void serve(int index) {
    std::uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (index >= active_ || index == absent_) continue;
      const std::function<void(int)>& task = *task_;
      lock.unlock();
      task(index);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::vector<std::thread> threads_;
  std::vector<int> placed_;
  const std::function<void(int)>* task_ = nullptr;
  std::uint64_t generation_ = 0;
  int active_ = 0, absent_ = 0;
  std::atomic<int> pending_{0};
  bool pinned_ = false;
};

// Which tasks are whose, and which are left.
class Shares {
 public:
  Shares(std::int64_t count, int threads) : shares_(new Share[threads]), threads_(threads) {
    for (int i = 0; i < threads; ++i) {
      shares_[i].next.store(count * i / threads, std::memory_order_relaxed);
      shares_[i].end = count * (i + 1) / threads;
    }
  }

  // Makes a thread's own tasks, then those that the others have not begun.
  void work(int thread, const std::function<void(std::int64_t)>& task) {
    for (int i = 0; i < threads_; ++i) {
      Share& share = shares_[(thread + i) % threads_];
      for (;;) {
        const std::int64_t next = share.next.fetch_add(1, std::memory_order_relaxed);
        if (next >= share.end) break;
        task(next);
      }
    }
  }

 private:
  struct alignas(64) Share {
    std::atomic<std::int64_t> next;
    std::int64_t end;
  };
  std::unique_ptr<Share[]> shares_;
  int threads_;
};

// Held while the pool works. Forking takes it first, so that a child never inherits a pool in mid-step; the child
// has none of the threads, so it lets go of the pool (which cannot be destroyed without joining them).
std::mutex pool_mutex;
Pool* pool = nullptr;

// Done while the library is loaded: by the time a step runs without the interpreter's lock, a fork must find it done.
const int fork_handlers = pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); },
                                         [] {
                                           pool = nullptr;
                                           pool_mutex.unlock();
                                         });

}  // namespace

double cgroup_cpus(const std::string& listing, const std::string& root) {
  double least = std::numeric_limits<double>::infinity();
  std::ifstream groups(listing);
  for (std::string line; std::getline(groups, line);) {  // "0::/path" or "4:cpu,cpuacct:/path"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string top = root + (controllers.empty() ? "" : "/" + controllers);
    // Inside a container the path may be the host's, of which only the root exists here.
    for (std::string path = line.substr(second + 1); path.size() > 1; path.erase(path.find_last_of('/'))) {
      least = std::min(least, quota_of(top + path));
    }
    least = std::min(least, quota_of(top));
  }
  return least;
}

// Likewise read once, while the library is loaded.
static const double quota = cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup");

int set_cpus([[maybe_unused]] pthread_t thread, [[maybe_unused]] const std::vector<int>& cpus) {
#if defined(__linux__)
  const int limit = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* mask = CPU_ALLOC(limit);
  if (mask == nullptr) return ENOMEM;
  const std::size_t size = CPU_ALLOC_SIZE(limit);
  CPU_ZERO_S(size, mask);
  for (const int cpu : cpus) CPU_SET_S(cpu, size, mask);
  const int error = pthread_setaffinity_np(thread, size, mask);
  CPU_FREE(mask);
  return error;
#else
  return 0;
#endif
}

int usable_threads(int requested) {
  const int cpus = static_cast<int>(allowed_cpus().size());
  int usable = cpus > 0 ? cpus : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (quota < usable) usable = static_cast<int>(std::ceil(quota));
  return std::max(1, std::min(requested, usable));
}

void run_parallel(int count, const std::function<void(int)>& task) {
  int first = 0;
  if (count > 1) {
    const std::unique_lock<std::mutex> lock(pool_mutex, std::try_to_lock);
    if (lock.owns_lock() && fork_handlers == 0) {
      if (pool == nullptr) pool = new Pool;  // never destroyed: threads may outlive static destructors
      first = pool->prepare(count);
      if (first > 0) pool->run(first, task);
    }
  }
  for (int index = first; index < count; ++index) task(index);
}

void share_out(std::int64_t count, int threads, const std::function<void(std::int64_t)>& task) {
  threads = static_cast<int>(std::clamp<std::int64_t>(count, 1, std::max(threads, 1)));
  Shares shares(count, threads);
  run_parallel(threads, [&](int thread) { shares.work(thread, task); });
}

}  // namespace zero_opt
