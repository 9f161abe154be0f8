// The maths: one scalar loop per operation, included once by each isa_*.cpp inside its own flags.
//
// Everything has internal linkage and no library header but <cstdint> is seen, so that no function
// compiled for a newer instruction set can be the copy which the linker keeps for the whole program.
// Every operation is an IEEE float operation in a fixed order; the only contraction is the fma written
// out below. So the bits depend neither on the vector width nor on where an array is cut.

#pragma once

#include "compact.inl"
#include "float_formats.inl"
#include "kernels.hpp"

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

// a / divisor, rounded once, given reciprocal = 1 / divisor rounded once. The divisor must be in [2^-64, 1] and a
// no smaller than 2^-75 unless it is zero: then nothing here is subnormal.
inline float divide(float a, float divisor, float reciprocal) {
#if defined(ZERO_OPT_HAS_FMA)
  // Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000 processor", theorem 8.3: the
  // remainder of the approximate quotient is exact, and correcting by it rounds correctly. An infinite a has no
  // remainder. Three multiplications leave the divider to the one division and the root that cannot do without.
  const float quotient = a * reciprocal;
  const float remainder = __builtin_fmaf(-quotient, divisor, a);
  const float corrected = __builtin_fmaf(remainder, reciprocal, quotient);
  return remainder == remainder ? corrected : quotient;
#else
  (void)reciprocal;
  return a / divisor;
#endif
}

// Where state is: in the caller's arrays, or in the staging of one_pass.inl.
struct LaneArrays {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;
  std::uint16_t* half_exp_avg;  // in place of exp_avg and exp_avg_sq: bf16 moments
  std::uint16_t* half_exp_avg_sq;
  std::uint16_t* half_param;  // in place of param, with the remainder: a split master
  std::int16_t* remainder;
};

// The values of up to kStaged elements, read from and written to.
struct Lanes {
  std::int64_t numel;
  LaneArrays from;
  LaneArrays to;
  const float* grad;
  const std::uint16_t* half_grad;  // in place of grad: bf16
};

// One Adam step (Kingma and Ba 2015, algorithm 1) with decoupled decay (Loshchilov and Hutter 2019,
// algorithm 2, line 12), L2 decay, and the maximum of Reddi et al. 2018 (algorithm 2), in the order of
// operations of torch's fused CPU kernel. Returns how many gradients are not finite.
//
// kTurned: torch's lerp starts from the end that is nearer to the result, which for beta1 <= 0.5 is the
// gradient. The choices are template parameters so that no loop carries a test. bf16 is converted in this loop because
// the divider leaves the rest of the processor idle in it.
template <bool kHalfGrad, bool kSplit, bool kHalf, bool kL2, bool kAmsgrad, bool kTurned>
std::int32_t adam_loop(const AdamScalars& scalars, const Lanes& lanes) {
  const AdamScalars s = scalars;
  const std::int64_t numel = lanes.numel;
  const LaneArrays from = lanes.from, to = lanes.to;
  const float* grad = lanes.grad;
  const std::uint16_t* half_grad = lanes.half_grad;
  const float reciprocal = 1.0f / s.bias_correction2_sqrt;
  std::int32_t nonfinite = 0;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < numel; ++i) {  // vectorise
    float g = s.grad_factor * (kHalfGrad ? bf16_to_float(half_grad[i]) : grad[i]);
    nonfinite += static_cast<std::int32_t>(bits_of(g) & kMagnitude) >= static_cast<std::int32_t>(kInfinity);
    const float p_old = kSplit ? joined(from.half_param[i], from.remainder[i]) : from.param[i];
    if constexpr (kL2) g = fma32(p_old, s.l2, g);
    const float p = p_old * s.decay;
    const float m_old = kHalf ? bf16_to_float(from.half_exp_avg[i]) : from.exp_avg[i];
    const float v_old = kHalf ? bf16_to_float(from.half_exp_avg_sq[i]) : from.exp_avg_sq[i];
    const float m = kTurned ? fma32(s.weight1 - 1.0f, g - m_old, g) : fma32(s.weight1, g - m_old, m_old);
    const float v = fma32(s.weight2 * g, g, v_old * s.beta2);
    float root_of = v;
    if constexpr (kAmsgrad) {
      // As torch's maximum: NaN on either side stays NaN.
      const float v_max = from.max_exp_avg_sq[i];
      root_of = ((v > v_max) | (v != v)) ? v : v_max;
      to.max_exp_avg_sq[i] = root_of;
    }
    const float denominator = divide(__builtin_sqrtf(root_of), s.bias_correction2_sqrt, reciprocal) + s.eps;
    if constexpr (kHalf) {
      const std::uint32_t drawn = chance(bits_of(m), bits_of(v), s.dither);
      to.half_exp_avg[i] = upper_half(m, drawn >> 16);
      to.half_exp_avg_sq[i] = upper_half(v, drawn & 0xffffu);
    } else {
      to.exp_avg[i] = m;
      to.exp_avg_sq[i] = v;
    }
    const float p_new = p - s.step_size * m / denominator;
    if constexpr (kSplit) {
      const std::uint32_t bits = separable(p_new);
      to.half_param[i] = param_of(bits);
      to.remainder[i] = static_cast<std::int16_t>(bits);
    } else {
      to.param[i] = p_new;
    }
  }
  return nonfinite;
}

template <bool kHalf, bool kL2, bool kAmsgrad>
std::int32_t adam_pick_lerp(const AdamScalars& scalars, const Lanes& lanes) {
  return scalars.weight1 < 0.5f ? adam_loop<false, false, kHalf, kL2, kAmsgrad, false>(scalars, lanes)
                                : adam_loop<false, false, kHalf, kL2, kAmsgrad, true>(scalars, lanes);
}

template <bool kHalf, bool kL2>
std::int32_t adam_pick_root(const AdamScalars& scalars, const Lanes& lanes) {
  return lanes.to.max_exp_avg_sq != nullptr ? adam_pick_lerp<kHalf, kL2, true>(scalars, lanes)
                                         : adam_pick_lerp<kHalf, kL2, false>(scalars, lanes);
}

template <bool kHalf>
std::int32_t adam_pick_decay(const AdamScalars& scalars, const Lanes& lanes) {
  return scalars.has_l2 ? adam_pick_root<kHalf, true>(scalars, lanes)
                        : adam_pick_root<kHalf, false>(scalars, lanes);
}

// Whether gradients in bf16 and split masters have loops of their own for this step: the usual one, without options.
inline bool converts(const AdamScalars& scalars, bool amsgrad) {
  return !scalars.has_l2 && !amsgrad && scalars.weight1 < 0.5f;
}

template <bool kHalf>
std::int32_t adam_pick_converting(const AdamScalars& scalars, const Lanes& lanes) {
  if (lanes.to.half_param == nullptr) return adam_loop<true, false, kHalf, false, false, false>(scalars, lanes);
  return lanes.half_grad != nullptr ? adam_loop<true, true, kHalf, false, false, false>(scalars, lanes)
                                    : adam_loop<false, true, kHalf, false, false, false>(scalars, lanes);
}

std::int32_t adam_pick(const AdamScalars& scalars, const Lanes& lanes) {
  if (lanes.half_grad != nullptr || lanes.to.half_param != nullptr) {
    return lanes.to.half_exp_avg != nullptr ? adam_pick_converting<true>(scalars, lanes)
                                         : adam_pick_converting<false>(scalars, lanes);
  }
  return lanes.to.half_exp_avg != nullptr ? adam_pick_decay<true>(scalars, lanes)
                                       : adam_pick_decay<false>(scalars, lanes);
}

}  // namespace
}  // namespace zero_opt
