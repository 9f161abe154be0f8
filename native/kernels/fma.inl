// The one contraction of the maths: included once by each isa_*.cpp, by the updates.
#pragma once

#include "kernels/avx_vectors.inl"
#include "kernels/kernels.hpp"

#if defined(__FAST_MATH__)
#error "the kernels promise exact bits: build without -ffast-math"
#endif
#if defined(__FLT_EVAL_METHOD__) && (__FLT_EVAL_METHOD__ == 1 || __FLT_EVAL_METHOD__ == 2)
#error "the kernels promise exact bits: float must be evaluated as float"
#endif

namespace zero_opt {
namespace {

#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__aarch64__)
#define ZERO_OPT_HAS_FMA
#endif

// a * b + c, rounded once.
inline float fma32(float a, float b, float c) {
#if defined(ZERO_OPT_HAS_FMA)
  return __builtin_fmaf(a, b, c);
#else
  // Without the instruction: the product of two floats is exact in double; TwoSum (Knuth) gives the
  // rounded sum and its exact error; the sum is then moved to the odd one of the two doubles that
  // enclose the exact value, after which rounding to float is as good as rounding once, since
  // 53 >= 24 + 2 (Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums: proved
  // algorithms using rounding to odd", theorem 1). When the sum is not finite the error is NaN and
  // taken as 0, so that infinities and NaN pass unchanged. No branch: it vectorizes.
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = static_cast<double>(c);
  const double sum = product + addend;
  const double shadow = sum - product;
  const double lost = (product - (sum - shadow)) + (addend - shadow);
  const double error = lost == lost ? lost : 0.0;
  // Whether the error is nonzero, by integer arithmetic: SSE2 compares no 64-bit integers.
  const std::uint64_t error_bits = __builtin_bit_cast(std::uint64_t, error);
  const std::uint64_t magnitude = error_bits << 1;
  const std::uint64_t inexact = (magnitude | (0 - magnitude)) >> 63;
  std::uint64_t bits = __builtin_bit_cast(std::uint64_t, sum);
  const std::uint64_t move = ~bits & inexact;  // 1 when the sum is even and inexact
  const std::uint64_t inward = (bits ^ error_bits) >> 63;
  bits += move - 2 * (move & inward);
  return static_cast<float>(__builtin_bit_cast(double, bits));
#endif
}

inline void fma_loop(const FmaRun& run) {
  const float* a = run.a;
  const float* b = run.b;
  const float* c = run.c;
  float* out = run.out;
  for (std::int64_t i = 0; i < run.numel; ++i) out[i] = fma32(a[i], b[i], c[i]);
}

}  // namespace
}  // namespace zero_opt
