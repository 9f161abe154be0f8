// The lane protocol of redo_log.hpp: included once by each isa_*.cpp, after one_pass.inl.
#pragma once

#include "one_pass.inl"
#include "redo_log.hpp"

namespace zero_opt {
namespace {

// The lane's word: 32 bits of the sequence number, and in the others how many blocks are committed, or one more than
// there are once the last is home.
inline std::uint64_t progress_word(std::uint64_t sequence, std::int64_t committed) {
  return sequence << 32 | static_cast<std::uint64_t>(committed);
}

inline std::int64_t committed_of(std::uint64_t word, std::uint64_t sequence) {
  const bool this_step = word >> 32 == (sequence & 0xffffffffu);
  return this_step ? static_cast<std::int64_t>(word & 0xffffffffu) : 0;
}

// No store moves across in either direction, in this thread's program order.
inline void commit(Lane& lane, std::uint64_t word) {
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  __atomic_store_n(&lane.progress, word, __ATOMIC_RELEASE);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

// A block: elements from begin to end of a run.
struct Block {
  const StepRun* run;
  std::int64_t begin, end;
};

// The block of a number, whose run is not before ``from``.
inline Block block_of(const StepRun* from, std::int64_t number) {
  while (number >= from->first_block + log_blocks(from->numel)) ++from;
  const std::int64_t begin = (number - from->first_block) * kLogNumel;
  return {from, begin, from->numel - begin < kLogNumel ? from->numel : begin + kLogNumel};
}

template <typename T>
inline T* at(char* base, std::uint64_t offset) {
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

// Where an array that has only the log's elements would start if it had those before ``begin`` too: the kernel counts
// elements from the start of the run.
template <typename T>
inline T* biased(void* in_log, std::int64_t begin, std::int64_t width, const void* home) {
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(in_log) - static_cast<std::uintptr_t>(begin * width);
  return home == nullptr ? nullptr : reinterpret_cast<T*>(first);
}

inline AdamArrays log_of(const AdamRun& run, std::int64_t begin, LogBlock& log) {
  const AdamArrays& home = run.from;
  const std::int64_t moment = bytes_of(run.moment_format);
  return {biased<void>(log.param, begin, home.remainder == nullptr ? 4 : 2, home.param),
          biased<std::int16_t>(log.remainder, begin, 2, home.remainder),
          biased<void>(log.exp_avg, begin, moment, home.exp_avg),
          biased<void>(log.exp_avg_sq, begin, moment, home.exp_avg_sq),
          biased<std::uint16_t>(log.exp_avg_base, begin / kCutNumel, 2, home.exp_avg_base),
          biased<std::uint16_t>(log.exp_avg_sq_base, begin / kCutNumel, 2, home.exp_avg_sq_base),
          biased<float>(log.max_exp_avg_sq, begin, 4, home.max_exp_avg_sq)};
}

// n elements of ``width`` bytes, from element ``begin`` of ``home`` on; no call for so few.
inline void copy_array(const void* in_log, std::int64_t begin, std::int64_t n, std::int64_t width, void* home) {
  if (home == nullptr) return;
  const char* from = static_cast<const char*>(in_log);
  char* to = static_cast<char*>(home) + begin * width;
  const std::int64_t bytes = n * width;
  std::int64_t done = 0;
  for (; done + kLine <= bytes; done += kLine) __builtin_memcpy(to + done, from + done, kLine);
  for (; done < bytes; ++done) to[done] = from[done];
}

void copy_home(const AdamRun& run, const Block& block, const LogBlock& log) {
  const AdamArrays& home = run.from;
  const std::int64_t begin = block.begin, n = block.end - begin, moment = bytes_of(run.moment_format);
  copy_array(log.param, begin, n, home.remainder == nullptr ? 4 : 2, home.param);
  copy_array(log.remainder, begin, n, 2, home.remainder);
  copy_array(log.exp_avg, begin, n, moment, home.exp_avg);
  copy_array(log.exp_avg_sq, begin, n, moment, home.exp_avg_sq);
  copy_array(log.max_exp_avg_sq, begin, n, 4, home.max_exp_avg_sq);
  const std::int64_t first = begin / kCutNumel, count = (n + kCutNumel - 1) / kCutNumel;
  copy_array(log.exp_avg_base, first, count, 2, home.exp_avg_base);
  copy_array(log.exp_avg_sq_base, first, count, 2, home.exp_avg_sq_base);
}

// A run as the kernel takes it, in this process; ``to`` is each block's own.
AdamRun run_in_place(char* base, const StepRun& run) {
  return {run.numel,       home_of(base, run.arrays), {}, base + run.grad, at<void>(base, run.out), run.grad_format,
          run.moment_format, run.out_format};
}

// Steps a block into the log. Returns how many of its gradients are not finite.
using StepBlock = std::int64_t (*)(const AdamScalars& scalars, AdamRun& run, const Block& block, LogBlock& log,
                                   Staging& staging);

std::int64_t step_staged(const AdamScalars& scalars, AdamRun& run, const Block& block, LogBlock& log,
                         Staging& staging) {
  run.to = log_of(run, block.begin, log);
  return adam_staged(scalars, run, block.begin, block.end - block.begin, staging);
}

// Whether a step of this run needs none of the ways round through other copies: the usual one.
inline bool goes_straight(const AdamRun& run, const AdamScalars& scalars) {
  return run.moment_format == Format::kFloat32 && run.from.remainder == nullptr && run.from.max_exp_avg_sq == nullptr &&
         (run.grad_format == Format::kFloat32 || run.grad_format == Format::kBfloat16) && converts(scalars, false);
}

// What step_staged does, with nothing to decide on: for so few elements deciding takes as long as the step.
std::int64_t step_straight(const AdamScalars& scalars, AdamRun& run, const Block& block, LogBlock& log,
                           Staging& staging) {
  const std::int64_t begin = block.begin;
  Lanes lanes = {};
  lanes.numel = block.end - begin;
  point_at_param(run.from, begin, lanes.from);
  point_at_moments(run.from, Format::kFloat32, begin, lanes.from);
  lanes.to.param = log.param;
  lanes.to.exp_avg = log.exp_avg;
  lanes.to.exp_avg_sq = log.exp_avg_sq;
  bool spoilt;
  if (run.grad_format == Format::kFloat32) {
    lanes.grad = static_cast<const float*>(run.grad) + begin;
    spoilt = adam_loop<false, false, false, false, false, false>(scalars, lanes);
  } else {
    lanes.half_grad = static_cast<const std::uint16_t*>(run.grad) + begin;
    spoilt = adam_loop<true, false, false, false, false, false>(scalars, lanes);
  }
  if (run.out != nullptr) write_out(run, begin, lanes.numel, log.param, staging);
  return spoilt ? count_nonfinite(scalars.grad_factor, lanes) : 0;
}

// Does what is left of the lane's part of the step. Returns how many of its gradients were not finite, counted once
// whoever did them.
std::int64_t run_lane(const LoggedStep& step, const BlockRange& range, Lane& lane) {
  const std::int64_t count = range.last - range.first;
  std::int64_t done = committed_of(__atomic_load_n(&lane.progress, __ATOMIC_ACQUIRE), step.sequence);
  if (done > 0 && done <= count) {
    const Block block = block_of(step.runs, range.first + done - 1);
    copy_home(run_in_place(step.base, *block.run), block, lane.logs[(done + 1) % 2]);
  }
  Staging staging;
  Block block = {step.runs, 0, 0};
  AdamRun run = {};
  StepBlock step_block = nullptr;
  for (; done < count; ++done) {
    const StepRun* last = block.run;
    block = block_of(last, range.first + done);
    const AdamScalars& scalars = step.scalars[block.run->scalars];
    if (step_block == nullptr || block.run != last) {
      run = run_in_place(step.base, *block.run);
      step_block = goes_straight(run, scalars) ? step_straight : step_staged;
    }
    LogBlock& log = lane.logs[done % 2];
    const std::int64_t before = done > 0 ? lane.logs[(done + 1) % 2].nonfinite : 0;
    log.nonfinite = before + step_block(scalars, run, block, log, staging);
    commit(lane, progress_word(step.sequence, done + 1));
    copy_home(run, block, log);
  }
  end_streams();
  if (done == count) commit(lane, progress_word(step.sequence, count + 1));
  return count > 0 ? lane.logs[(count + 1) % 2].nonfinite : 0;
}

}  // namespace
}  // namespace zero_opt
