// A step that survives the death of its process at any instruction, by a redo log.
//
// A lane is a fixed range of the step's blocks, which one thread steps. It computes block k from its home into log k % 2,
// commits k, and then copies the block home. The commit word says what a successor has to do: with n blocks committed,
// block n - 1 is in its log and may be home in part, all before it are home, and of those after it nothing has been
// written but ``out``, which nothing reads. So the successor copies block n - 1 home, once more or for the first time,
// and goes on.
//
// After a process is killed, memory holds for each of its threads a prefix of the stores in the program's order. The
// function keeps the compiler from changing that order around the commits; within a block every order will do. Stores
// past the caches are not ordered by the processor, but complete when it enters the kernel to die, and a successor does
// not begin before that.
//
// Included by the per-ISA files, so nothing here may emit code and only <cstdint> may be included.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace zero_opt {

// Elements of a run that are stepped at a time. So few that the processor, while it copies one block home, is already
// computing the next: what a log costs are its stores, and beside divisions and roots there is room for those.
constexpr std::int64_t kLogNumel = 64;
static_assert(kLogNumel % kCutNumel == 0, "the blocks of 8-bit moments must not be cut");

// Of each translation unit's own, like bytes_of.
static inline constexpr std::int64_t log_blocks(std::int64_t numel) { return (numel + kLogNumel - 1) / kLogNumel; }

// StateArrays as offsets.
struct StepArrays {
  std::uint64_t param, remainder, exp_avg, exp_avg_sq, exp_avg_base, exp_avg_sq_base, max_exp_avg_sq;
};

// UpdateRun as offsets; the state is written where it was read, by way of the log.
struct StepRun {
  std::int64_t numel;
  std::int64_t first_block;  // number of its first block; blocks are numbered through all runs of the step
  std::int64_t scalars;      // number of its scalars
  StepArrays arrays;
  std::uint64_t grad, out;
  Format grad_format, moment_format, out_format;
};

// The new state of one block before it goes home.
struct alignas(64) LogBlock {
  std::int64_t nonfinite;  // gradients of the lane that were not finite, up to and with this block
  alignas(64) std::uint16_t exp_avg_base[kLogNumel / kCutNumel];
  alignas(64) std::uint16_t exp_avg_sq_base[kLogNumel / kCutNumel];
  alignas(64) float param[kLogNumel];
  alignas(64) float exp_avg[kLogNumel];
  alignas(64) float exp_avg_sq[kLogNumel];
  alignas(64) float max_exp_avg_sq[kLogNumel];
  alignas(64) std::int16_t remainder[kLogNumel];
};

// What has been done of a lane. Two processes see ``progress``: atomic builtins only.
struct alignas(64) Lane {
  std::uint64_t progress;
  LogBlock logs[2];
};

// A submitted step in this process.
struct LoggedStep {
  char* base;  // of the arena
  const StepRun* runs;
  const StepScalars* scalars;
  std::uint64_t sequence;
  bool past_caches;  // blocks of the usual runs go home past the caches where they are whole lines
};

// The step's blocks from first on, before last.
struct BlockRange {
  std::int64_t first, last;
};

}  // namespace zero_opt
