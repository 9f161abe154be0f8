// What the kernels read and write, as plain data: filled by any caller, in or out of process.
// Included by the per-ISA files, so nothing here may emit code and only <cstdint> may be included.
#pragma once

#include <cstdint>

namespace zero_opt {

// One step's scalars. They are computed once, in double, and rounded to float once.
struct AdamScalars {
  float step_size;              // lr / (1 - beta1^t)
  float bias_correction2_sqrt;  // sqrt(1 - beta2^t)
  float decay;                  // 1 - lr * weight_decay; 1 when the decay is not decoupled
  float l2;                     // weight_decay added to the gradient; 0 when the decay is decoupled
  float weight1;                // 1 - beta1
  float weight2;                // 1 - beta2
  float beta2;
  float eps;
  float sign;  // -1 to maximize, else 1
};

// A contiguous run of elements that share one step's scalars. max_exp_avg_sq is null without amsgrad.
struct AdamRun {
  AdamScalars scalars;
  std::int64_t numel;
  float* param;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;
};

// Three arrays of factors and an addend, for the fused multiply-add on its own.
struct FmaRun {
  std::int64_t numel;
  const float* a;
  const float* b;
  const float* c;
  float* out;
};

// The kernels of one instruction set. Every table computes the same bits.
struct Kernels {
  const char* name;
  void (*adam)(const AdamRun& run);
  void (*fma)(const FmaRun& run);
};

}  // namespace zero_opt
