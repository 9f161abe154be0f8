#include "redo_log.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "flush_denormals.hpp"
#include "thread_pool.hpp"

namespace zero_opt {
namespace {

// Waking the threads takes about as long as this many elements.
constexpr std::int64_t kAloneNumel = 65536;

// The lane's word: 32 bits of the sequence number, and in the others how many blocks are committed, or one more than
// there are once the last is home.
std::uint64_t progress_word(std::uint64_t sequence, std::int64_t committed) {
  return sequence << 32 | static_cast<std::uint64_t>(committed);
}

std::int64_t committed_of(std::uint64_t word, std::uint64_t sequence) {
  const bool this_step = word >> 32 == (sequence & 0xffffffffu);
  return this_step ? static_cast<std::int64_t>(word & 0xffffffffu) : 0;
}

// No store moves across in either direction, in this thread's program order.
void commit(Lane& lane, std::uint64_t word) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  lane.progress.store(word, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// A block: elements from begin to end of a run.
struct Block {
  const StepRun* run;
  std::int64_t begin, end;
};

Block block_of(const LoggedStep& step, std::int64_t number) {
  const StepRun* after = std::upper_bound(step.runs, step.runs + step.run_count, number,
                                          [](std::int64_t block, const StepRun& run) { return block < run.first_block; });
  const StepRun& run = after[-1];
  const std::int64_t begin = (number - run.first_block) * kLogNumel;
  return {&run, begin, std::min(begin + kLogNumel, run.numel)};
}

// Calls each(offset of the block in the arena, where it is in the log, bytes) for every array of state.
template <typename Each>
void for_state(const Block& block, LogBlock& log, const Each& each) {
  const StepArrays& arrays = block.run->arrays;
  const std::int64_t begin = block.begin, n = block.end - begin;
  const auto array = [&](std::uint64_t offset, void* in_log, std::int64_t width) {
    if (offset != 0) each(offset + static_cast<std::uint64_t>(begin * width), in_log, static_cast<std::size_t>(n * width));
  };
  const auto bases = [&](std::uint64_t offset, std::uint16_t* in_log) {
    const std::int64_t first = begin / kCutNumel, count = (n + kCutNumel - 1) / kCutNumel;
    if (offset != 0) each(offset + static_cast<std::uint64_t>(first) * 2, in_log, static_cast<std::size_t>(count) * 2);
  };
  const std::int64_t moment = bytes_of(block.run->moment_format);
  array(arrays.param, log.param, arrays.remainder == 0 ? 4 : 2);
  array(arrays.remainder, log.remainder, 2);
  array(arrays.exp_avg, log.exp_avg, moment);
  array(arrays.exp_avg_sq, log.exp_avg_sq, moment);
  bases(arrays.exp_avg_base, log.exp_avg_base);
  bases(arrays.exp_avg_sq_base, log.exp_avg_sq_base);
  array(arrays.max_exp_avg_sq, log.max_exp_avg_sq, 4);
}

void copy_home(const LoggedStep& step, const Block& block, LogBlock& log) {
  for_state(block, log, [&](std::uint64_t offset, const void* in_log, std::size_t bytes) {
    std::memcpy(step.base + offset, in_log, bytes);
  });
}

template <typename T>
T* at(char* base, std::uint64_t offset) {
  return offset == 0 ? nullptr : reinterpret_cast<T*>(base + offset);
}

AdamArrays home_of(char* base, const StepArrays& arrays) {
  return {at<void>(base, arrays.param),
          at<std::int16_t>(base, arrays.remainder),
          at<void>(base, arrays.exp_avg),
          at<void>(base, arrays.exp_avg_sq),
          at<std::uint16_t>(base, arrays.exp_avg_base),
          at<std::uint16_t>(base, arrays.exp_avg_sq_base),
          at<float>(base, arrays.max_exp_avg_sq)};
}

// Where an array that has only the log's elements would start if it had those before begin too: the kernel counts
// elements from the start of the run.
template <typename T>
T* biased(void* in_log, std::int64_t begin, std::int64_t width, std::uint64_t offset) {
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(in_log) - static_cast<std::uintptr_t>(begin * width);
  return offset == 0 ? nullptr : reinterpret_cast<T*>(first);
}

AdamArrays log_of(const Block& block, LogBlock& log) {
  const StepArrays& home = block.run->arrays;
  const std::int64_t begin = block.begin, moment = bytes_of(block.run->moment_format);
  return {biased<void>(log.param, begin, home.remainder == 0 ? 4 : 2, home.param),
          biased<std::int16_t>(log.remainder, begin, 2, home.remainder),
          biased<void>(log.exp_avg, begin, moment, home.exp_avg),
          biased<void>(log.exp_avg_sq, begin, moment, home.exp_avg_sq),
          biased<std::uint16_t>(log.exp_avg_base, begin / kCutNumel, 2, home.exp_avg_base),
          biased<std::uint16_t>(log.exp_avg_sq_base, begin / kCutNumel, 2, home.exp_avg_sq_base),
          biased<float>(log.max_exp_avg_sq, begin, 4, home.max_exp_avg_sq)};
}

// Returns how many of the block's gradients are not finite.
std::int64_t compute(const LoggedStep& step, const Block& block, LogBlock& log) {
  const StepRun& run = *block.run;
  const AdamRun kernel_run = {run.numel,
                              home_of(step.base, run.arrays),
                              log_of(block, log),
                              step.base + run.grad,
                              at<void>(step.base, run.out),
                              run.grad_format,
                              run.moment_format,
                              run.out_format};
  return step.kernels->adam(step.scalars[run.scalars], kernel_run, block.begin, block.end);
}

}  // namespace

BlockRange blocks_of_lane(std::int64_t blocks, std::int64_t lane, std::int64_t lanes) {
  return {blocks * lane / lanes, blocks * (lane + 1) / lanes};
}

std::int64_t run_lane(const LoggedStep& step, const BlockRange& range, Lane& lane) {
  const std::int64_t count = range.last - range.first;
  std::int64_t done = committed_of(lane.progress.load(std::memory_order_acquire), step.sequence);
  for (; done <= count; ++done) {
    // Here ``done`` blocks are committed, and all but the last of them are home.
    LogBlock& last = lane.logs[(done + 1) % 2];
    if (done > 0) copy_home(step, block_of(step, range.first + done - 1), last);
    if (done < count) {
      LogBlock& next = lane.logs[done % 2];
      const std::int64_t found = compute(step, block_of(step, range.first + done), next);
      next.nonfinite = found + (done > 0 ? last.nonfinite : 0);
    }
    commit(lane, progress_word(step.sequence, done + 1));
  }
  return count > 0 ? lane.logs[(count - 1) % 2].nonfinite : 0;
}

void finish_step(const ArenaView& arena, std::size_t mapped_bytes, int lanes) {
  ControlBlock& control = arena.control();
  const std::uint64_t sequence = control.submitted.load(std::memory_order_acquire);
  if (control.completed.load(std::memory_order_acquire) == sequence) return;
  const StepHead& head = control.step;
  if (head.arena_bytes > mapped_bytes) throw std::runtime_error("the arena has grown since this worker was started");
  const LoggedStep step = {arena.base(), arena.runs(), arena.scalars(),
                           head.runs,    head.blocks,  sequence, &kernels_named(std::string(head.isa))};
  std::atomic<std::int64_t> nonfinite{0};
  const auto work = [&](int lane) {
    const FlushDenormals mode(head.flush_denormals != 0);
    nonfinite += run_lane(step, blocks_of_lane(head.blocks, lane, lanes), arena.lanes()[lane]);
  };
  if (head.numel > kAloneNumel) {
    run_parallel(lanes, work);
  } else {
    for (int lane = 0; lane < lanes; ++lane) work(lane);
  }
  control.nonfinite.store(static_cast<std::uint64_t>(nonfinite.load()), std::memory_order_relaxed);
  control.completed.store(sequence, std::memory_order_release);
}

}  // namespace zero_opt
