// A step that survives the death of its process at any instruction, by a redo log.
//
// A lane is a fixed range of the step's blocks. Its thread computes block k from its home into log k % 2, commits k,
// and then copies the block home while nothing else is read from there. The commit word says what a successor has to
// do: with n blocks committed, block n - 1 is in its log and may be home in part, all before it are home, and of those
// after it nothing has been written but ``out``, which nothing reads. So the successor runs the same function, which
// begins where the word says.
//
// After a process is killed, memory holds for each of its threads a prefix of the stores in the program's order. The
// function keeps the compiler from changing that order around the commits; within a block every order will do.
#pragma once

#include <cstdint>

#include "control_block.hpp"
#include "dispatch.hpp"

namespace zero_opt {

// A submitted step in this process.
struct LoggedStep {
  char* base;  // of the arena
  const StepRun* runs;
  const AdamScalars* scalars;
  std::int64_t run_count, blocks;
  std::uint64_t sequence;
  const Kernels* kernels;
};

// The step's blocks from first on, before last.
struct BlockRange {
  std::int64_t first, last;
};

// Those of one of several lanes.
BlockRange blocks_of_lane(std::int64_t blocks, std::int64_t lane, std::int64_t lanes);

// Does what is left of the lane's part of the step. Returns how many of its gradients were not finite, counted once
// whoever did them.
std::int64_t run_lane(const LoggedStep& step, const BlockRange& range, Lane& lane);

// Finishes the step that was submitted, if it is not finished, with a thread for each lane. Throws std::runtime_error,
// with nothing written, if the step needs more of the arena than is mapped here or kernels that there are none of.
void finish_step(const ArenaView& arena, std::size_t mapped_bytes, int lanes);

}  // namespace zero_opt
