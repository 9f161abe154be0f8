#include "worker/control.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "threads/flush_denormals.hpp"

namespace zero_opt {
namespace {

using Clock = std::chrono::steady_clock;

// A small step is done sooner than a sleeper is woken.
constexpr auto kSpin = std::chrono::microseconds(5);
// After a wait that the kernel has refused.
constexpr auto kRetry = std::chrono::milliseconds(1);

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

// Bytes of the arrays of a run.
struct Sizes {
  std::int64_t param, remainder, moment, base, maximum;
};

Sizes sizes_of(const UpdateRun& run) {
  const std::int64_t n = run.numel;
  return {n * (run.from.remainder == nullptr ? 4 : 2), n * 2, n * bytes_of(run.moment_format),
          (n + kCutNumel - 1) / kCutNumel * 2, n * 4};
}

bool overlap(std::uint64_t a, std::int64_t a_bytes, std::uint64_t b, std::int64_t b_bytes) {
  return a < b + static_cast<std::uint64_t>(b_bytes) && b < a + static_cast<std::uint64_t>(a_bytes);
}

// Calls work(array, bytes) for those there are.
template <typename Work>
void for_arrays(const StepArrays& arrays, const Sizes& sizes, const Work& work) {
  const std::pair<std::uint64_t, std::int64_t> all[] = {
      {arrays.param, sizes.param},          {arrays.remainder, sizes.remainder},
      {arrays.exp_avg, sizes.moment},       {arrays.exp_avg_sq, sizes.moment},
      {arrays.exp_avg_base, sizes.base},    {arrays.exp_avg_sq_base, sizes.base},
      {arrays.max_exp_avg_sq, sizes.maximum}};
  for (const auto& [array, bytes] : all) {
    if (array != 0) work(array, bytes);
  }
}

bool same(const StateArrays& a, const StateArrays& b) {
  return a.param == b.param && a.remainder == b.remainder && a.exp_avg == b.exp_avg && a.exp_avg_sq == b.exp_avg_sq &&
         a.exp_avg_base == b.exp_avg_base && a.exp_avg_sq_base == b.exp_avg_sq_base &&
         a.max_exp_avg_sq == b.max_exp_avg_sq;
}

// Throws unless a run can be made any number of times.
void check_apart(const StepRun& run, const StepArrays& to, const Sizes& sizes) {
  for_arrays(to, sizes, [&](std::uint64_t written, std::int64_t bytes) {
    bool meets = overlap(written, bytes, run.grad, run.numel * bytes_of(run.grad_format));
    meets = meets || (run.out != 0 && overlap(written, bytes, run.out, run.numel * bytes_of(run.out_format)));
    for_arrays(run.arrays, sizes, [&](std::uint64_t read, std::int64_t read_bytes) {
      meets = meets || overlap(written, bytes, read, read_bytes);
    });
    if (meets) throw std::invalid_argument("a draft would overwrite what a successor may have to read again");
  });
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

StepArrays Control::offsets_of(const StateArrays& arrays, const UpdateRun& run) const {
  const Sizes sizes = sizes_of(run);
  return {offset_of(arrays.param, sizes.param),
          offset_of(arrays.remainder, sizes.remainder),
          offset_of(arrays.exp_avg, sizes.moment),
          offset_of(arrays.exp_avg_sq, sizes.moment),
          offset_of(arrays.exp_avg_base, sizes.base),
          offset_of(arrays.exp_avg_sq_base, sizes.base),
          offset_of(arrays.max_exp_avg_sq, sizes.maximum)};
}

StepRun Control::translated(const UpdateRun& run) const {
  const std::int64_t n = run.numel;
  StepRun step = {};
  step.numel = n;
  step.arrays = offsets_of(run.from, run);
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

std::uint64_t Control::submit(const std::vector<UpdateBatch>& batches, int wake_fd, bool flush_denormals,
                              bool past_caches, const std::string& isa) {
  ControlBlock& block = control();
  const std::uint64_t sequence = submitted();
  if (completed() != sequence) {
    throw std::invalid_argument("step " + std::to_string(sequence) + " is not finished");
  }
  StepHead head = this->head(flush_denormals || FlushDenormals::own(), isa);
  head.past_caches = past_caches;
  std::int64_t scalars = 0;
  for_runs(batches, [&](const UpdateRun& given, const StepScalars* fresh) {
    if (head.runs == static_cast<std::int64_t>(max_runs_)) {
      throw std::invalid_argument("more runs than the " + std::to_string(max_runs_) + " there is room for");
    }
    if (!same(given.from, given.to)) throw std::invalid_argument("a step is made where the state is");
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

StepHead Control::head(bool flush_denormals, const std::string& isa) const {
  StepHead head = {};
  head.arena_bytes = bytes_;
  head.flush_denormals = flush_denormals;
  isa.copy(head.isa, kIsaBytes - 1);
  return head;
}

std::uint64_t Control::draft(const std::vector<UpdateBatch>& batches, int wake_fd, bool flush_denormals,
                             const std::string& isa) {
  std::vector<Draft> drafts;
  StepScalars scalars = {};
  for_runs(batches, [&](const UpdateRun& given, const StepScalars* fresh) {
    if (fresh != nullptr) scalars = *fresh;
    Draft draft = {};
    draft.run = {translated(given), offsets_of(given.to, given), scalars};
    check_apart(draft.run.run, draft.run.to, sizes_of(given));
    drafts.push_back(draft);
  });
  return put(drafts, wake_fd, head(flush_denormals, isa));
}

std::uint64_t Control::draft_sums(const std::vector<GradArray>& grads, int wake_fd, bool flush_denormals,
                                  const std::string& isa) {
  std::vector<Draft> drafts;
  for (const GradArray& given : grads) {
    if (given.numel == 0) continue;
    const std::int64_t grad = given.numel * bytes_of(given.format);
    const std::int64_t squares = (given.numel + kSumNumel - 1) / kSumNumel * static_cast<std::int64_t>(sizeof(double));
    Draft draft = {};
    draft.sum = {given.numel, offset_of(given.data, grad), offset_of(given.squares, squares), given.format};
    if (overlap(draft.sum.grad, grad, draft.sum.squares, squares)) {
      throw std::invalid_argument("sums would overwrite the gradient, which a successor may have to read again");
    }
    drafts.push_back(draft);
  }
  return put(drafts, wake_fd, head(flush_denormals, isa));
}

std::uint64_t Control::put(const std::vector<Draft>& drafts, int wake_fd, const StepHead& head) {
  ControlBlock& block = control();
  const std::uint64_t first = drafted();
  if (drafts_done() == first) block.drafts_origin.store(first, std::memory_order_relaxed);
  std::uint64_t next = first;
  const std::uint64_t end = block.drafts_origin.load(std::memory_order_relaxed) + max_runs_;
  for (Draft draft : drafts) {
    draft.arena_bytes = head.arena_bytes;
    draft.flush_denormals = head.flush_denormals;
    std::memcpy(draft.isa, head.isa, kIsaBytes);
    const std::int64_t blocks = log_blocks(std::max(draft.run.run.numel, draft.sum.numel));
    for (std::int64_t at = 0; at < blocks; at += kDraftBlocks) {
      if (next == end) throw std::overflow_error("there is no room for more drafts until some are done");
      draft.blocks = {at, std::min(at + kDraftBlocks, blocks)};
      view_.drafts()[next++ - (end - max_runs_)] = draft;
    }
  }
  block.drafted.store(next, std::memory_order_release);
  if (next != first) ring(wake_fd);
  return next;
}

void Control::void_drafts() { control().drafts_void.store(drafted(), std::memory_order_release); }

Waited Control::wait(std::uint64_t sequence, int done_fd, int worker_pidfd, double seconds) {
  return wait_for(control().completed, sequence, done_fd, worker_pidfd, seconds);
}

Waited Control::wait_drafts(std::uint64_t drafts, int done_fd, int worker_pidfd, double seconds) {
  return wait_for(control().drafts_done, drafts, done_fd, worker_pidfd, seconds);
}

Waited Control::wait_for(const Word& word, std::uint64_t value, int done_fd, int worker_pidfd, double seconds) {
  const auto done = [&] { return word.load(std::memory_order_acquire) >= value; };
  const auto begin = Clock::now();
  const auto deadline = begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (;;) {
    if (done()) return Waited::kDone;
    if (Clock::now() - begin < kSpin) continue;
    pollfd events[2] = {{done_fd, POLLIN, 0}, {worker_pidfd, POLLIN, 0}};
    const int ready = poll(events, 2, milliseconds_until(deadline));
    const bool interrupted = ready < 0 && errno == EINTR;
    // For a moment the kernel lacks memory. The word says whether the worker is done.
    if (ready < 0 && !interrupted) std::this_thread::sleep_for(kRetry);
    std::uint64_t rung;
    // The worker has made the descriptor one that does not block.
    if (ready > 0 && events[0].revents != 0) (void)!read(done_fd, &rung, sizeof(rung));
    if (done()) return Waited::kDone;
    if (ready > 0 && events[1].revents != 0) return Waited::kDead;
    if (interrupted || Clock::now() >= deadline) return Waited::kWaiting;
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
  words.push_back(drafts_done());
  return words;
}

}  // namespace zero_opt
