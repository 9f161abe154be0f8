// The lane protocol of redo_log.hpp: included once by each isa_*.cpp, after staged_step.inl.
#pragma once

#include "kernels/block_in_registers.inl"
#include "kernels/redo_log.hpp"

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

// Where the block that starts at element begin of a run ends.
inline std::int64_t end_of_block(std::int64_t numel, std::int64_t begin) {
  return numel - begin < kLogNumel ? numel : begin + kLogNumel;
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
  return {from, begin, end_of_block(from->numel, begin)};
}

template <typename T>
inline T* at(char* base, std::uint64_t offset) {
  return offset == 0 ? nullptr : reinterpret_cast<T*>(base + offset);
}

StateArrays home_of(char* base, const StepArrays& arrays) {
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

inline StateArrays log_of(const UpdateRun& run, std::int64_t begin, LogBlock& log) {
  const StateArrays& home = run.from;
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

void copy_home(const UpdateRun& run, const Block& block, const LogBlock& log) {
  const StateArrays& home = run.from;
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
UpdateRun run_in_place(char* base, const StepRun& run) {
  return {run.numel,       home_of(base, run.arrays), {}, base + run.grad, at<void>(base, run.out), run.grad_format,
          run.moment_format, run.out_format};
}

// Steps the blocks of any run, from a given one on. As BlockInRegisters, but that a block may be shorter than the
// others.
struct Staged {
  const StepScalars& scalars;
  UpdateRun run;
  Block block;
  Staging& staging;

  // A block into the log. Returns how many of its gradients are not finite.
  std::int64_t step(LogBlock& log) {
    run.to = log_of(run, block.begin, log);
    return update_staged(scalars, run, block.begin, block.end - block.begin, staging);
  }

  void home(const LogBlock& log) const { copy_home(run, block, log); }

  void leave_caches() {}

  void next() { block = {block.run, block.end, end_of_block(run.numel, block.end)}; }
};

// Blocks ``done`` to ``end`` of the lane, which are of one run, through the log.
template <typename Stepper>
void log_blocks_of(Stepper at, std::uint64_t sequence, std::int64_t done, std::int64_t end, Lane& lane) {
  std::int64_t nonfinite = done > 0 ? lane.logs[(done + 1) % 2].nonfinite : 0;
  for (; done < end; at.next()) {
    LogBlock& log = lane.logs[done % 2];
    nonfinite += at.step(log);
    log.nonfinite = nonfinite;
    commit(lane, progress_word(sequence, ++done));
    at.home(log);
  }
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
  const StepRun* from = step.runs;
  while (done < count) {
    const Block block = block_of(from, range.first + done);
    from = block.run;
    const StepScalars& scalars = step.scalars[from->scalars];
    const UpdateRun run = run_in_place(step.base, *from);
    const std::int64_t whole = steps_in_registers(run, scalars) ? (run.numel - block.begin) / kLogNumel : 0;
    const std::int64_t blocks = whole > 0 ? whole : log_blocks(run.numel - block.begin);
    const std::int64_t end = blocks < count - done ? done + blocks : count;
    const auto log_all = [&](auto at) {
      if (step.past_caches) at.leave_caches();
      log_blocks_of(at, step.sequence, done, end, lane);
    };
    if (whole > 0) {
      with_block_in_registers(scalars, run, block.begin, log_all);
    } else {
      log_all(Staged{scalars, run, block, staging});
    }
    done = end;
  }
  end_streams();
  if (done == count) commit(lane, progress_word(step.sequence, count + 1));
  return count > 0 ? lane.logs[(count + 1) % 2].nonfinite : 0;
}

}  // namespace
}  // namespace zero_opt
