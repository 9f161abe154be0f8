// bf16 and fp16 <-> fp32 in integer arithmetic: included once by each isa_*.cpp, like step_loop.inl.
//
// The compiler's own _Float16 casts do not vectorize; these do, at every width. No branch, ties to even, an
// overflow becomes infinity, NaN stays NaN. No intermediate value is an fp32 subnormal, so the results are the
// same when the processor flushes those to zero (an fp32 subnormal is itself far below fp16's smallest number).
#pragma once

#include <cstdint>

#include "kernels/avx_vectors.inl"

// Where a caller knows lengths that the function does not.
#define ZERO_OPT_INLINE inline __attribute__((always_inline))

namespace zero_opt {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffffu;
constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr std::uint32_t kQuietNan = 0x7fc00000u;

inline std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float bf16_to_float(std::uint16_t bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }

inline std::uint32_t words_of(float value) { return bits_of(value); }

inline bool is_nonfinite(float value) {
  return static_cast<std::int32_t>(bits_of(value) & kMagnitude) >= static_cast<std::int32_t>(kInfinity);
}

// A bf16 number in the upper half of a word, and anything below, for a float, or for each of a vector of them. Every NaN
// becomes the positive quiet one, as in torch.
template <typename Word, typename Value>
inline Word rounded_bf16(Value value) {
  const Word bits = words_of(value);
  const Word rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return value == value ? rounded : Word{} + kQuietNan;
}

inline std::uint16_t float_to_bf16(float value) {
  return static_cast<std::uint16_t>(rounded_bf16<std::uint32_t>(value) >> 16);
}

// The exponent is rebased by an integer addition. A subnormal gets the exponent of 2^-14 with a leading one that
// it does not have, which a subtraction then takes away exactly.
inline float fp16_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t shifted = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
  const std::uint32_t exponent = shifted & (0x7c00u << 13);
  const std::uint32_t normal = shifted + ((127u - 15u) << 23);
  const std::uint32_t special = normal + ((128u - 16u) << 23);
  const std::uint32_t subnormal = bits_of(float_of(shifted + (113u << 23)) - float_of(113u << 23));
  const std::uint32_t finite = exponent == 0 ? subnormal : normal;
  return float_of((exponent == (0x7c00u << 13) ? special : finite) | sign);
}

// Where fp16 is subnormal its spacing is 2^-24, which is the spacing of fp32 in [0.5, 1): adding 0.5 rounds there.
inline std::uint16_t float_to_fp16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & kMagnitude;
  const std::uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const std::uint32_t special = magnitude > kInfinity ? 0x7e00u : 0x7c00u;
  const std::uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  return static_cast<std::uint16_t>((magnitude >= (143u << 23) ? special : finite) | sign);
}

}  // namespace
}  // namespace zero_opt
