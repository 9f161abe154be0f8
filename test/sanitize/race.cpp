// For ThreadSanitizer: what is done by several processes, done by threads of one, on one mapping of what they share.
//
// Usage: race UPDATE | exchange
// UPDATE, such as "adam": a trainer that submits its steps and waits, and the worker's whole life beside it.
// "exchange": three ranks of a host exchanging buckets. The linker is to wrap mmap, read and write: a second mapping
// would hide what is shared, and the events would look as though they ordered memory, which sequence numbers alone are
// to do.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "exchange/host_exchange.hpp"
#include "kernels/dispatch.hpp"
#include "scenario.hpp"
#include "worker/control.hpp"
#include "worker/worker.hpp"

namespace {

char* shared_base = nullptr;
int shared_fd = -1;

}  // namespace

extern "C" {
void* __real_mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset);

void* __wrap_mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (fd >= 0 && fd == shared_fd && shared_base != nullptr) return shared_base;
  return __real_mmap(address, bytes, protection, flags, fd, offset);
}

ssize_t __wrap_read(int fd, void* to, std::size_t bytes) { return syscall(SYS_read, fd, to, bytes); }

ssize_t __wrap_write(int fd, const void* from, std::size_t bytes) { return syscall(SYS_write, fd, from, bytes); }
}

namespace {

using zero_opt::Format;
using zero_opt::HostRun;
using zero_opt::UpdateRun;

constexpr int kThreads = 2, kLanes = 8, kSteps = 12, kMaxRuns = 4;
// So long that there is work for several threads.
constexpr std::int64_t kNumel = 70'001;
constexpr auto kPatience = std::chrono::seconds(120);

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

char* arena_of(std::size_t bytes) {
  const int fd = memfd_create("race", MFD_CLOEXEC);
  require(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0, "no memory");
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  require(base != MAP_FAILED, "no mapping");
  shared_fd = fd;
  shared_base = static_cast<char*>(base);
  return shared_base;
}

const crash::Update kUpdates[] = {{"adam", 2}, {"adagrad", 1}, {"lion", 1}, {"sgd", 1}};

const crash::Update& update_named(const char* name) {
  for (const crash::Update& update : kUpdates) {
    if (update.name == name) return update;
  }
  throw std::runtime_error(std::string("no steps of ") + name);
}

// Of all arrays.
std::size_t numel_of(const crash::Update& update) { return static_cast<std::size_t>((2 + update.arrays) * kNumel); }

std::vector<zero_opt::UpdateBatch> batch_at(const crash::Update& update, float* first, int step) {
  const UpdateRun run = crash::plain_run(update, first, kNumel);
  return {{crash::hypers_of(update, 0.01), {{run, static_cast<double>(step), nullptr}}}};
}

void fill_gradient(const crash::Update& update, float* first, int step) {
  float* const grad = first + (1 + update.arrays) * kNumel;
  for (std::int64_t i = 0; i < kNumel; ++i) grad[i] = static_cast<float>((i * 37 + step * 101) % 997) - 498;
}

template <typename Condition>
void await(const Condition& condition, const char* what) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) require(std::chrono::steady_clock::now() < deadline, what);
}

void train(const crash::Update& update, zero_opt::Control& control, float* arrays, int wake, int done, int pidfd) {
  std::vector<float> own(numel_of(update));
  for (int step = 1; step <= kSteps; ++step) {
    fill_gradient(update, arrays, step);
    fill_gradient(update, own.data(), step);
    const bool past_caches = step % 2 == 0;
    const std::uint64_t sequence = control.submit(batch_at(update, arrays, step), wake, false, past_caches, "baseline");
    await(
        [&] {
          (void)control.progress();
          (void)control.error();
          return control.wait(sequence, done, pidfd, 0.01) == zero_opt::Waited::kDone;
        },
        "a step is not made");
    zero_opt::update_step(zero_opt::kernels_named("baseline"), batch_at(update, own.data(), step), {1, false});
    require(std::memcmp(arrays, own.data(), own.size() * sizeof(float)) == 0, "other bits");
    require(control.nonfinite() == 0, "gradients that are not finite");
  }
}

// Does not return: the worker ends the process when it is asked to go.
void worker(const crash::Update& update) {
  const std::size_t control_bytes = zero_opt::ArenaView(nullptr, kLanes, kMaxRuns).control_bytes();
  const std::size_t bytes = control_bytes + numel_of(update) * sizeof(float);
  char* base = arena_of(bytes);
  const int wake = eventfd(0, EFD_NONBLOCK), done = eventfd(0, EFD_NONBLOCK);
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  zero_opt::Control control(base, bytes, kLanes, kMaxRuns);
  std::thread life([&] { zero_opt::worker_run({shared_fd, wake, done, pidfd}, {}, kThreads); });
  await([&] { return control.generation() != 0; }, "the worker does not become ready");
  train(update, control, reinterpret_cast<float*>(base + control_bytes), wake, done, pidfd);
  std::printf("%d steps of %s\n", kSteps, update.name.c_str());
  std::fflush(stdout);
  control.stop(wake);
  std::this_thread::sleep_for(kPatience);
  throw std::runtime_error("the worker does not go");
}

constexpr int kRanks = 3, kExchanges = 20;
constexpr std::int64_t kDataAt = 4096, kSlotBytes = 1024;

// Steps of one rank: the mean of a bucket, and back; every element of rank r is r + 1 + its number.
void exchange_as(int rank, const std::vector<char*>& arenas) {
  const std::int64_t shard = 700, numel = shard * kRanks - 13;
  std::vector<float> values(static_cast<std::size_t>(numel)), mean(static_cast<std::size_t>(shard));
  zero_opt::HostRanks ranks(rank, arenas, kDataAt, kSlotBytes);
  zero_opt::HostBucket bucket = {
      {{0, numel, reinterpret_cast<char*>(values.data()), false}}, {0, shard, 2 * shard, 3 * shard}, Format::kFloat32};
  for (int number = 0; number < kExchanges; ++number) {
    for (std::int64_t i = 0; i < numel; ++i) values[i] = static_cast<float>(rank + 1 + i);
    const auto step = static_cast<std::uint64_t>(number);
    zero_opt::HostProgress progress = {zero_opt::Staged::kNotYet, 0, 0};
    await(
        [&] {
          progress = ranks.reduce({step, 0, 0}, bucket, reinterpret_cast<char*>(mean.data()), progress.published, 1.0);
          return progress.state == zero_opt::Staged::kSlot0;
        },
        "a peer does not come");
    const std::int64_t begin = shard * rank, end = std::min(begin + shard, numel);
    for (std::int64_t i = begin; i < end; ++i) values[i] = mean[i - begin];
    progress.published = 0;
    await(
        [&] {
          progress = ranks.gather({step, 1, 0}, bucket, progress.published, 1.0);
          return progress.state == zero_opt::Staged::kSlot0;
        },
        "a peer does not come");
    for (std::int64_t i = 0; i < numel; ++i) require(values[i] == static_cast<float>(2 + i), "another mean");
  }
}

void exchange() {
  char* base = arena_of(kRanks * (kDataAt + 2 * kSlotBytes));
  std::vector<char*> arenas;
  for (int rank = 0; rank < kRanks; ++rank) arenas.push_back(base + rank * (kDataAt + 2 * kSlotBytes));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back([&, rank] { exchange_as(rank, arenas); });
  for (std::thread& rank : ranks) rank.join();
  std::printf("%d exchanges\n", kExchanges);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    require(argc == 2, "usage: race UPDATE | exchange");
    std::strcmp(argv[1], "exchange") == 0 ? exchange() : worker(update_named(argv[1]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::fflush(stderr);
    _exit(3);
  }
}
