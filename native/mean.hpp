// What the mean kernels read and write, as plain data. Included by the per-ISA files: only <cstdint>, no code.
#pragma once

#include <cstdint>

namespace zero_opt {

// count >= 2 chunks of numel elements, one per rank, and where their mean goes.
struct MeanRun {
  std::int64_t numel;
  std::int32_t count;
  const void* const* sources;
  void* out;
};

// The mean kernels of one instruction set. bf16 is summed in float and rounded once.
struct MeanKernels {
  void (*float32)(const MeanRun& run);
  void (*bfloat16)(const MeanRun& run);
};

}  // namespace zero_opt
