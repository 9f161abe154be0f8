#include "control.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "flush_denormals.hpp"

namespace zero_opt {
namespace {

using Clock = std::chrono::steady_clock;

// A small step is done sooner than a sleeper is woken.
constexpr auto kSpin = std::chrono::microseconds(5);

void ring(int event_fd) {
  const std::uint64_t one = 1;
  // A full counter has woken the sleeper already.
  if (write(event_fd, &one, sizeof(one)) < 0 && errno != EAGAIN) {
    throw std::runtime_error(std::string("the worker cannot be woken: ") + std::strerror(errno));
  }
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::max<std::int64_t>(left, 0));
}

void check_format(const ControlBlock& control, std::size_t lanes, std::size_t max_runs) {
  if (control.magic != kControlMagic || control.version != kControlVersion || control.log_numel != kLogNumel) {
    throw std::invalid_argument("the arena's control area was made by another version of the extension");
  }
  if (control.lanes != lanes || control.max_runs != max_runs) {
    throw std::invalid_argument("the arena's control area was made for " + std::to_string(control.lanes) +
                                " lanes and " + std::to_string(control.max_runs) + " runs");
  }
}

bool overlap(std::uint64_t a, std::int64_t a_bytes, std::uint64_t b, std::int64_t b_bytes) {
  return a < b + static_cast<std::uint64_t>(b_bytes) && b < a + static_cast<std::uint64_t>(a_bytes);
}

}  // namespace

Control::Control(char* base, std::size_t bytes, std::size_t lanes, std::size_t max_runs)
    : view_(base, lanes, max_runs), bytes_(bytes), lanes_(lanes), max_runs_(max_runs) {
  if (lanes == 0 || max_runs == 0) throw std::invalid_argument("there must be a lane and room for a run");
  if (bytes < view_.control_bytes()) {
    throw std::invalid_argument("an arena of " + std::to_string(bytes) + " bytes has no room for a control area of " +
                                std::to_string(view_.control_bytes()));
  }
  ControlBlock& block = control();
  if (block.magic == 0) {
    block.version = kControlVersion;
    block.log_numel = kLogNumel;
    block.lanes = lanes;
    block.max_runs = max_runs;
    block.control_bytes = view_.control_bytes();
    block.magic = kControlMagic;
  }
  check_format(block, lanes, max_runs);
}

std::uint64_t Control::offset_of(const void* array, std::int64_t bytes) const {
  if (array == nullptr) return 0;
  const std::uintptr_t base = reinterpret_cast<std::uintptr_t>(view_.base());
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(array) - base;  // huge if it lies before
  const std::size_t size = static_cast<std::size_t>(bytes);
  if (offset < view_.control_bytes() || offset > bytes_ || size > bytes_ - offset) {
    throw std::invalid_argument("an array of " + std::to_string(bytes) + " bytes does not lie in the arena's data");
  }
  return offset;
}

StepRun Control::translated(const AdamRun& run) const {
  const std::int64_t n = run.numel, moment = n * bytes_of(run.moment_format);
  const std::int64_t bases = (n + kCutNumel - 1) / kCutNumel * 2;
  const AdamArrays& from = run.from;
  StepRun step = {};
  step.numel = n;
  step.arrays = {offset_of(from.param, n * (from.remainder == nullptr ? 4 : 2)),
                 offset_of(from.remainder, n * 2),
                 offset_of(from.exp_avg, moment),
                 offset_of(from.exp_avg_sq, moment),
                 offset_of(from.exp_avg_base, bases),
                 offset_of(from.exp_avg_sq_base, bases),
                 offset_of(from.max_exp_avg_sq, n * 4)};
  const std::int64_t grad = n * bytes_of(run.grad_format), out = n * bytes_of(run.out_format);
  step.grad = offset_of(run.grad, grad);
  step.out = offset_of(run.out, out);
  if (step.out != 0 && overlap(step.out, out, step.grad, grad)) {
    throw std::invalid_argument("the output would overwrite the gradient, which a successor may have to read again");
  }
  step.grad_format = run.grad_format;
  step.moment_format = run.moment_format;
  step.out_format = run.out_format;
  return step;
}

std::uint64_t Control::submit(const std::vector<AdamBatch>& batches, int wake_fd, bool flush_denormals,
                              const std::string& isa) {
  ControlBlock& block = control();
  const std::uint64_t sequence = submitted();
  if (completed() != sequence) {
    throw std::invalid_argument("step " + std::to_string(sequence) + " is not finished");
  }
  StepHead head = {};
  head.arena_bytes = bytes_;
  head.flush_denormals = flush_denormals || FlushDenormals::own();
  isa.copy(head.isa, kIsaBytes - 1);
  std::int64_t scalars = 0;
  for_runs(batches, [&](const AdamRun& given, const AdamScalars* fresh) {
    if (head.runs == static_cast<std::int64_t>(max_runs_)) {
      throw std::invalid_argument("more runs than the " + std::to_string(max_runs_) + " there is room for");
    }
    if (fresh != nullptr) view_.scalars()[scalars++] = *fresh;
    StepRun run = translated(given);
    run.scalars = scalars - 1;
    run.first_block = head.blocks;
    view_.runs()[head.runs++] = run;
    head.blocks += log_blocks(run.numel);
    head.numel += run.numel;
  });
  block.step = head;
  block.submitted.store(sequence + 1, std::memory_order_release);
  ring(wake_fd);
  return sequence + 1;
}

Waited Control::wait(std::uint64_t sequence, int done_fd, int worker_pidfd, double seconds) {
  const auto begin = Clock::now();
  const auto deadline = begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (;;) {
    if (completed() >= sequence) return Waited::kDone;
    if (Clock::now() - begin < kSpin) continue;
    pollfd events[2] = {{done_fd, POLLIN, 0}, {worker_pidfd, POLLIN, 0}};
    const int ready = poll(events, 2, milliseconds_until(deadline));
    if (ready < 0 && errno != EINTR) throw std::runtime_error(std::string("poll: ") + std::strerror(errno));
    std::uint64_t rung;
    // The worker has made the descriptor one that does not block.
    if (ready > 0 && events[0].revents != 0) (void)!read(done_fd, &rung, sizeof(rung));
    if (completed() >= sequence) return Waited::kDone;
    if (ready > 0 && events[1].revents != 0) return Waited::kDead;
    if (ready < 0 || Clock::now() >= deadline) return Waited::kWaiting;
  }
}

void Control::stop(int wake_fd) {
  control().stop.store(1, std::memory_order_release);
  ring(wake_fd);
}

std::string Control::error() const {
  const std::uint64_t bytes = control().error_bytes.load(std::memory_order_acquire);
  return std::string(control().error, std::min<std::uint64_t>(bytes, kErrorBytes));
}

std::vector<std::uint64_t> Control::progress() const {
  std::vector<std::uint64_t> words;
  for (std::size_t lane = 0; lane < lanes_; ++lane) {
    words.push_back(__atomic_load_n(&view_.lanes()[lane].progress, __ATOMIC_ACQUIRE));
  }
  return words;
}

}  // namespace zero_opt
