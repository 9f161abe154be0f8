// The maths: one scalar loop per operation, included once by each isa_*.cpp inside its own flags.
//
// Everything has internal linkage and no library header but <cstdint> is seen, so that no function
// compiled for a newer instruction set can be the copy which the linker keeps for the whole program.
// Every operation is an IEEE float operation in a fixed order; the only contraction is the fma written
// out below. So the bits depend neither on the vector width nor on where an array is cut.

#include "kernels.hpp"

#if defined(__FAST_MATH__)
#error "the kernels promise exact bits: build without -ffast-math"
#endif
#if defined(__FLT_EVAL_METHOD__) && (__FLT_EVAL_METHOD__ == 1 || __FLT_EVAL_METHOD__ == 2)
#error "the kernels promise exact bits: float must be evaluated as float"
#endif

namespace zero_opt {
namespace {

// a * b + c, rounded once.
inline float fma32(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  // Without the instruction: the product of two floats is exact in double; TwoSum (Knuth) gives the
  // rounded sum and its exact error; the sum is then moved to the odd one of the two doubles that
  // enclose the exact value, after which rounding to float is as good as rounding once, since
  // 53 >= 24 + 2 (Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums: proved
  // algorithms using rounding to odd", theorem 1). When the sum is not finite the error is NaN and
  // taken as 0, so that infinities and NaN pass unchanged. No branch: it vectorises.
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

void fma_loop(const FmaRun& run) {
  const float* a = run.a;
  const float* b = run.b;
  const float* c = run.c;
  float* out = run.out;
  for (std::int64_t i = 0; i < run.numel; ++i) out[i] = fma32(a[i], b[i], c[i]);
}

// One Adam step (Kingma and Ba 2015, algorithm 1) with decoupled decay (Loshchilov and Hutter 2019,
// algorithm 2, line 12), L2 decay, and the maximum of Reddi et al. 2018 (algorithm 2), in the order of
// operations of torch's fused CPU kernel.
//
// kTurned: torch's lerp starts from the end that is nearer to the result, which for beta1 <= 0.5 is the
// gradient. The three choices are template parameters so that no loop carries a test.
template <bool kL2, bool kAmsgrad, bool kTurned>
void adam_loop(const AdamRun& run) {
  const AdamScalars s = run.scalars;
  const std::int64_t numel = run.numel;
  float* param = run.param;
  const float* grad = run.grad;
  float* exp_avg = run.exp_avg;
  float* exp_avg_sq = run.exp_avg_sq;
  float* max_exp_avg_sq = run.max_exp_avg_sq;
  for (std::int64_t i = 0; i < numel; ++i) {
    float g = s.sign * grad[i];
    if constexpr (kL2) g = fma32(param[i], s.l2, g);
    const float p = param[i] * s.decay;
    const float m_old = exp_avg[i];
    const float m = kTurned ? fma32(s.weight1 - 1.0f, g - m_old, g) : fma32(s.weight1, g - m_old, m_old);
    const float v = fma32(s.weight2 * g, g, exp_avg_sq[i] * s.beta2);
    float root_of = v;
    if constexpr (kAmsgrad) {
      // As torch's maximum: NaN on either side stays NaN.
      const float v_max = max_exp_avg_sq[i];
      root_of = ((v > v_max) | (v != v)) ? v : v_max;
      max_exp_avg_sq[i] = root_of;
    }
    const float denominator = __builtin_sqrtf(root_of) / s.bias_correction2_sqrt + s.eps;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = p - s.step_size * m / denominator;
  }
}

template <bool kL2, bool kAmsgrad>
void adam_pick_lerp(const AdamRun& run) {
  if (run.scalars.weight1 < 0.5f) {
    adam_loop<kL2, kAmsgrad, false>(run);
  } else {
    adam_loop<kL2, kAmsgrad, true>(run);
  }
}

void adam(const AdamRun& run) {
  const bool l2 = run.scalars.l2 != 0.0f;
  if (run.max_exp_avg_sq != nullptr) {
    l2 ? adam_pick_lerp<true, true>(run) : adam_pick_lerp<false, true>(run);
  } else {
    l2 ? adam_pick_lerp<true, false>(run) : adam_pick_lerp<false, false>(run);
  }
}

}  // namespace
}  // namespace zero_opt
