// The maths: one scalar loop per operation, included once by each isa_*.cpp inside its own flags.
//
// Everything has internal linkage and no library header but <cstdint> is seen, so that no function
// compiled for a newer instruction set can be the copy which the linker keeps for the whole program.
// Every operation is an IEEE float operation in a fixed order; the only contraction is the fma written
// out in fma.inl. So the bits depend neither on the vector width nor on where an array is cut.

#pragma once

#include "kernels/compact.inl"
#include "kernels/float_formats.inl"
#include "kernels/kernels.hpp"
#include "kernels/update_table.inl"

namespace zero_opt {
namespace {

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

// Whether ``out`` gets another value than the new param.
inline bool predicts(const StepScalars& scalars, const UpdateRun& run) {
  return run.out != nullptr && scalars.prediction != 0.0f;
}

// Steps all elements. Returns whether a gradient is not finite: zero times it is NaN then. bf16 is converted in this
// loop because the divider leaves the rest of the processor idle in it.
template <typename Update, bool kHalfGrad, bool kSplit, bool kHalf>
ZERO_OPT_INLINE bool step_loop(const StepScalars& scalars, const Lanes& lanes) {
  const typename Update::Scalars s = scalars_in<typename Update::Scalars>(scalars.now);
  const float grad_factor = scalars.grad_factor;
  const std::uint32_t dither = scalars.dither;
  const std::int64_t numel = lanes.numel;
  const LaneArrays from = lanes.from, to = lanes.to;
  const float* grad = lanes.grad;
  const std::uint16_t* half_grad = lanes.half_grad;
  std::uint32_t spoilt = 0;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < numel; ++i) {  // vectorise
    const float g = grad_factor * (kHalfGrad ? bf16_to_float(half_grad[i]) : grad[i]);
    spoilt |= bits_of(g * 0.0f);
    Element<float> old = {};
    old.param = kSplit ? joined(from.half_param[i], from.remainder[i]) : from.param[i];
    if constexpr (Update::kArrays > 0) old.exp_avg = kHalf ? bf16_to_float(from.half_exp_avg[i]) : from.exp_avg[i];
    if constexpr (Update::kArrays > 1) {
      old.exp_avg_sq = kHalf ? bf16_to_float(from.half_exp_avg_sq[i]) : from.exp_avg_sq[i];
    }
    if constexpr (Update::kArrays > 2) old.max_exp_avg_sq = from.max_exp_avg_sq[i];
    const Element<float> stepped = Update::step(s, g, old);
    if constexpr (Update::kArrays > 2) to.max_exp_avg_sq[i] = stepped.max_exp_avg_sq;
    if constexpr (kHalf) {
      const Halves halves = rounded_moments<kHalfGrad>(stepped.exp_avg, stepped.exp_avg_sq, dither);
      to.half_exp_avg[i] = static_cast<std::uint16_t>(halves.exp_avg >> 16);
      to.half_exp_avg_sq[i] = static_cast<std::uint16_t>(halves.exp_avg_sq >> 16);
    } else {
      if constexpr (Update::kArrays > 0) to.exp_avg[i] = stepped.exp_avg;
      if constexpr (Update::kArrays > 1) to.exp_avg_sq[i] = stepped.exp_avg_sq;
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
bool step_pairs(const StepScalars& scalars, const Lanes& lanes) {
  const AdamScalars s = adam_in(scalars);
  const float grad_factor = scalars.grad_factor;
  const std::uint32_t dither = scalars.dither;
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
    const float g1 = grad_factor * first_of(grad[i]), g2 = grad_factor * second_of(grad[i]);
    spoilt |= bits_of(g1 * 0.0f) | bits_of(g2 * 0.0f);
    const float p1 = joined_bits(p << 16, static_cast<std::int32_t>(r << 16) >> 16);
    const float p2 = joined_bits(p & kUpper, static_cast<std::int32_t>(r) >> 16);
    const Element<float> old1 = {p1, first_of(m), first_of(v), 0.0f}, old2 = {p2, second_of(m), second_of(v), 0.0f};
    const Element<float> one = UsualUpdate::step(s, g1, old1);
    const Element<float> two = UsualUpdate::step(s, g2, old2);
    const Halves moments1 = rounded_moments<true>(one.exp_avg, one.exp_avg_sq, dither);
    const Halves moments2 = rounded_moments<true>(two.exp_avg, two.exp_avg_sq, dither);
    to_exp_avg[i] = uppers(moments1.exp_avg, moments2.exp_avg);
    to_exp_avg_sq[i] = uppers(moments1.exp_avg_sq, moments2.exp_avg_sq);
    const std::uint32_t bits1 = separable<std::uint32_t>(one.param), bits2 = separable<std::uint32_t>(two.param);
    to_param[i] = uppers(bits1 + kRoundParam, bits2 + kRoundParam);
    to_remainder[i] = (bits1 & ~kUpper) | bits2 << 16;
  }
  return (spoilt & kMagnitude) != 0;
}

// How many arrays of state there are.
inline int arrays_in(const LaneArrays& arrays) {
  if (arrays.exp_avg == nullptr) return 0;
  if (arrays.exp_avg_sq == nullptr) return 1;
  return arrays.max_exp_avg_sq == nullptr ? 2 : 3;
}

// All arrays in fp32.
bool pick_update(const StepScalars& scalars, const Lanes& lanes) {
  return with_update(scalars, arrays_in(lanes.to), [&](auto update) {
    return step_loop<decltype(update), false, false, false>(scalars, lanes);
  });
}

// The same with bf16 moments.
bool pick_halves(const StepScalars& scalars, const Lanes& lanes) {
  return Adam::with_update(adam_in(scalars), lanes.to.max_exp_avg_sq == nullptr ? 2 : 3, [&](auto update) {
    return step_loop<decltype(update), false, false, true>(scalars, lanes);
  });
}

// The usual update, where gradients or masters are converted in the loop.
template <bool kHalf>
bool pick_converting(const StepScalars& scalars, const Lanes& lanes) {
  if constexpr (kHalf) {
    const bool pairs = lanes.half_grad != nullptr && lanes.to.half_param != nullptr && lanes.numel % 2 == 0;
    if (pairs) return step_pairs(scalars, lanes);
  }
  if (lanes.to.half_param == nullptr) return step_loop<UsualUpdate, true, false, kHalf>(scalars, lanes);
  return lanes.half_grad != nullptr ? step_loop<UsualUpdate, true, true, kHalf>(scalars, lanes)
                                    : step_loop<UsualUpdate, false, true, kHalf>(scalars, lanes);
}

bool pick_loop(const StepScalars& scalars, const Lanes& lanes) {
  if (lanes.half_grad != nullptr || lanes.to.half_param != nullptr) {
    return lanes.to.half_exp_avg != nullptr ? pick_converting<true>(scalars, lanes)
                                            : pick_converting<false>(scalars, lanes);
  }
  return lanes.to.half_exp_avg != nullptr ? pick_halves(scalars, lanes) : pick_update(scalars, lanes);
}

}  // namespace
}  // namespace zero_opt
