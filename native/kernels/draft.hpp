// A step from one bank of state to another, which a successor may make again from its beginning.
//
// A run is read in one bank and written to the other, and nobody reads the other before the trainer says that it is the
// one that counts. So whoever dies while he makes a draft leaves what there was, and it can be made as often as needed.
//
// Included by the per-ISA files, so nothing here may emit code and only <cstdint> may be included.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"
#include "kernels/redo_log.hpp"

namespace zero_opt {

struct DraftRun {
  StepRun run;    // its arrays are read; first_block and scalars are not used
  StepArrays to;  // written; the same ones are 0
  StepScalars scalars;
};

// The sums of squares of an array of gradients, one per kSumNumel elements.
struct DraftSum {
  std::int64_t numel;
  std::uint64_t grad, squares;  // read; written, as doubles
  Format format;
};

}  // namespace zero_opt
