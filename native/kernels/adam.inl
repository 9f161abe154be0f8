// The maths: one scalar loop per operation, included once by each isa_*.cpp inside its own flags.
//
// Everything has internal linkage and no library header but <cstdint> is seen, so that no function
// compiled for a newer instruction set can be the copy which the linker keeps for the whole program.
// Every operation is an IEEE float operation in a fixed order; the only contraction is the fma written
// out below. So the bits depend neither on the vector width nor on where an array is cut.

#pragma once

#include "kernels/compact.inl"
#include "kernels/float_formats.inl"
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

void fma_loop(const FmaRun& run) {
  const float* a = run.a;
  const float* b = run.b;
  const float* c = run.c;
  float* out = run.out;
  for (std::int64_t i = 0; i < run.numel; ++i) out[i] = fma32(a[i], b[i], c[i]);
}

// Value is a float, or a vector of floats: then what is said of an element is of as many.
template <typename Value>
inline Value all(float value) {
  return value - Value{};
}

inline float root(float value) { return __builtin_sqrtf(value); }

// a / divisor, rounded once, given reciprocal = 1 / divisor rounded once. The divisor must be in [2^-64, 1] and a
// no smaller than 2^-75 unless it is zero: then nothing here is subnormal. kFinite: who calls discards what comes of an
// infinite a.
template <bool kFinite, typename Value>
inline Value divide(Value a, Value divisor, Value reciprocal) {
#if defined(ZERO_OPT_HAS_FMA)
  // Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000 processor", theorem 8.3: the
  // remainder of the approximate quotient is exact, and correcting by it rounds correctly. An infinite a has no
  // remainder. Three multiplications leave the divider to the one division and the root that cannot do without.
  const Value quotient = a * reciprocal;
  const Value remainder = fma32(-quotient, divisor, a);
  const Value corrected = fma32(remainder, reciprocal, quotient);
  if constexpr (kFinite) return corrected;
  return remainder == remainder ? corrected : quotient;
#else
  (void)reciprocal;
  return a / divisor;
#endif
}

// Where state is: in the caller's arrays, or in the staging of staged_step.inl.
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

// Two bf16 numbers, or remainders, side by side: the first is the lower half of the word.
typedef std::uint32_t Pair __attribute__((may_alias, aligned(2)));
constexpr std::uint32_t kUpper = 0xffff0000u;

inline const Pair* pairs_of(const void* array) { return static_cast<const Pair*>(array); }
inline Pair* pairs_of(void* array) { return static_cast<Pair*>(array); }

inline float first_of(Pair pair) { return float_of(pair << 16); }
inline float second_of(Pair pair) { return float_of(pair & kUpper); }
inline std::uint32_t uppers(std::uint32_t first, std::uint32_t second) { return first >> 16 | (second & kUpper); }

// The state of one element.
template <typename Value>
struct Element {
  Value param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// One Adam step (Kingma and Ba 2015, algorithm 1) with decoupled decay (Loshchilov and Hutter 2019,
// algorithm 2, line 12), L2 decay, and the maximum of Reddi et al. 2018 (algorithm 2), in the order of
// operations of torch's fused CPU kernel.
//
// kTurned: torch's lerp starts from the end that is nearer to the result, which for beta1 <= 0.5 is the
// gradient. The choices are template parameters so that no loop carries a test.
template <bool kL2, bool kAmsgrad, bool kTurned, bool kFinite = false, typename Value>
inline Element<Value> step_element(const AdamScalars& s, Value g, const Element<Value>& old) {
  if constexpr (kL2) g = fma32(old.param, all<Value>(s.l2), g);
  const Value p = old.param * s.decay;
  const Value turn = g - old.exp_avg;
  const Value m = kTurned ? fma32(all<Value>(s.weight1 - 1.0f), turn, g)
                          : fma32(all<Value>(s.weight1), turn, old.exp_avg);
  const Value v = fma32(s.weight2 * g, g, old.exp_avg_sq * s.beta2);
  Value root_of = v;
  // As torch's maximum: NaN on either side stays NaN.
  if constexpr (kAmsgrad) root_of = ((v > old.max_exp_avg_sq) | (v != v)) ? v : old.max_exp_avg_sq;
  const Value denominator =
      divide<kFinite>(root(root_of), all<Value>(s.bias_correction2_sqrt), all<Value>(s.reciprocal)) + s.eps;
  return {p - s.step_size * m / denominator, m, v, root_of};
}

// Steps all elements. Returns whether a gradient is not finite: zero times it is NaN then. bf16 is converted in this
// loop because the divider leaves the rest of the processor idle in it.
template <bool kHalfGrad, bool kSplit, bool kHalf, bool kL2, bool kAmsgrad, bool kTurned>
ZERO_OPT_INLINE bool adam_loop(const AdamScalars& scalars, const Lanes& lanes) {
  const AdamScalars s = scalars;
  const std::int64_t numel = lanes.numel;
  const LaneArrays from = lanes.from, to = lanes.to;
  const float* grad = lanes.grad;
  const std::uint16_t* half_grad = lanes.half_grad;
  std::uint32_t spoilt = 0;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < numel; ++i) {  // vectorise
    const float g = s.grad_factor * (kHalfGrad ? bf16_to_float(half_grad[i]) : grad[i]);
    spoilt |= bits_of(g * 0.0f);
    Element<float> old;
    old.param = kSplit ? joined(from.half_param[i], from.remainder[i]) : from.param[i];
    old.exp_avg = kHalf ? bf16_to_float(from.half_exp_avg[i]) : from.exp_avg[i];
    old.exp_avg_sq = kHalf ? bf16_to_float(from.half_exp_avg_sq[i]) : from.exp_avg_sq[i];
    old.max_exp_avg_sq = kAmsgrad ? from.max_exp_avg_sq[i] : 0.0f;
    const Element<float> stepped = step_element<kL2, kAmsgrad, kTurned>(s, g, old);
    if constexpr (kAmsgrad) to.max_exp_avg_sq[i] = stepped.max_exp_avg_sq;
    if constexpr (kHalf) {
      const Halves halves = rounded_moments<kHalfGrad>(stepped.exp_avg, stepped.exp_avg_sq, s.dither);
      to.half_exp_avg[i] = static_cast<std::uint16_t>(halves.exp_avg >> 16);
      to.half_exp_avg_sq[i] = static_cast<std::uint16_t>(halves.exp_avg_sq >> 16);
    } else {
      to.exp_avg[i] = stepped.exp_avg;
      to.exp_avg_sq[i] = stepped.exp_avg_sq;
    }
    if constexpr (kSplit) {
      const std::uint32_t bits = separable<std::uint32_t>(stepped.param);
      to.half_param[i] = param_of(bits);
      to.remainder[i] = static_cast<std::int16_t>(bits);
    } else {
      to.param[i] = stepped.param;
    }
  }
  return (spoilt & kMagnitude) != 0;
}

// The same where every array is of 16-bit numbers, two at a time as the halves of a word: numbers are taken out and put
// back with fewer instructions than it takes to widen and narrow them, which are what this loop would wait for.
// numel is even.
bool adam_pairs(const AdamScalars& scalars, const Lanes& lanes) {
  const AdamScalars s = scalars;
  const std::int64_t count = lanes.numel / 2;
  const Pair *grad = pairs_of(lanes.half_grad), *param = pairs_of(lanes.from.half_param),
             *remainder = pairs_of(lanes.from.remainder), *exp_avg = pairs_of(lanes.from.half_exp_avg),
             *exp_avg_sq = pairs_of(lanes.from.half_exp_avg_sq);
  Pair *to_param = pairs_of(lanes.to.half_param), *to_remainder = pairs_of(lanes.to.remainder),
       *to_exp_avg = pairs_of(lanes.to.half_exp_avg), *to_exp_avg_sq = pairs_of(lanes.to.half_exp_avg_sq);
  std::uint32_t spoilt = 0;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {  // vectorise
    const std::uint32_t p = param[i], r = remainder[i], m = exp_avg[i], v = exp_avg_sq[i];
    const float g1 = s.grad_factor * first_of(grad[i]), g2 = s.grad_factor * second_of(grad[i]);
    spoilt |= bits_of(g1 * 0.0f) | bits_of(g2 * 0.0f);
    const float p1 = joined_bits(p << 16, static_cast<std::int32_t>(r << 16) >> 16);
    const float p2 = joined_bits(p & kUpper, static_cast<std::int32_t>(r) >> 16);
    const Element<float> old1 = {p1, first_of(m), first_of(v), 0.0f}, old2 = {p2, second_of(m), second_of(v), 0.0f};
    const Element<float> one = step_element<false, false, false>(s, g1, old1);
    const Element<float> two = step_element<false, false, false>(s, g2, old2);
    const Halves moments1 = rounded_moments<true>(one.exp_avg, one.exp_avg_sq, s.dither);
    const Halves moments2 = rounded_moments<true>(two.exp_avg, two.exp_avg_sq, s.dither);
    to_exp_avg[i] = uppers(moments1.exp_avg, moments2.exp_avg);
    to_exp_avg_sq[i] = uppers(moments1.exp_avg_sq, moments2.exp_avg_sq);
    const std::uint32_t bits1 = separable<std::uint32_t>(one.param), bits2 = separable<std::uint32_t>(two.param);
    to_param[i] = uppers(bits1 + kRoundParam, bits2 + kRoundParam);
    to_remainder[i] = (bits1 & ~kUpper) | bits2 << 16;
  }
  return (spoilt & kMagnitude) != 0;
}

template <bool kHalf, bool kL2, bool kAmsgrad>
bool adam_pick_lerp(const AdamScalars& scalars, const Lanes& lanes) {
  return scalars.weight1 < 0.5f ? adam_loop<false, false, kHalf, kL2, kAmsgrad, false>(scalars, lanes)
                                : adam_loop<false, false, kHalf, kL2, kAmsgrad, true>(scalars, lanes);
}

template <bool kHalf, bool kL2>
bool adam_pick_root(const AdamScalars& scalars, const Lanes& lanes) {
  return lanes.to.max_exp_avg_sq != nullptr ? adam_pick_lerp<kHalf, kL2, true>(scalars, lanes)
                                         : adam_pick_lerp<kHalf, kL2, false>(scalars, lanes);
}

template <bool kHalf>
bool adam_pick_decay(const AdamScalars& scalars, const Lanes& lanes) {
  return scalars.has_l2 ? adam_pick_root<kHalf, true>(scalars, lanes)
                        : adam_pick_root<kHalf, false>(scalars, lanes);
}

// Whether gradients in bf16 and split masters have loops of their own for this step: the usual one, without options.
inline bool converts(const AdamScalars& scalars, bool amsgrad) {
  return !scalars.has_l2 && !amsgrad && scalars.weight1 < 0.5f;
}

template <bool kHalf>
bool adam_pick_converting(const AdamScalars& scalars, const Lanes& lanes) {
  if constexpr (kHalf) {
    const bool pairs = lanes.half_grad != nullptr && lanes.to.half_param != nullptr && lanes.numel % 2 == 0;
    if (pairs) return adam_pairs(scalars, lanes);
  }
  if (lanes.to.half_param == nullptr) return adam_loop<true, false, kHalf, false, false, false>(scalars, lanes);
  return lanes.half_grad != nullptr ? adam_loop<true, true, kHalf, false, false, false>(scalars, lanes)
                                    : adam_loop<false, true, kHalf, false, false, false>(scalars, lanes);
}

bool adam_pick(const AdamScalars& scalars, const Lanes& lanes) {
  if (lanes.half_grad != nullptr || lanes.to.half_param != nullptr) {
    return lanes.to.half_exp_avg != nullptr ? adam_pick_converting<true>(scalars, lanes)
                                         : adam_pick_converting<false>(scalars, lanes);
  }
  return lanes.to.half_exp_avg != nullptr ? adam_pick_decay<true>(scalars, lanes)
                                       : adam_pick_decay<false>(scalars, lanes);
}

}  // namespace
}  // namespace zero_opt
