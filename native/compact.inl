// Compact forms of the optimizer state: included once by each isa_*.cpp, like adam.inl.
//
// Split master. master bits = (param bits << 16) + remainder, the remainder a signed 16-bit integer, so the pair
// is the fp32 master exactly. The param is the master rounded to nearest with ties away from zero: with ties to
// even two masters would share one pair. Lost: the payload of NaN.
//
// Moments. Rounded to nearest, an exp_avg_sq of few bits would stop moving once a step changes it by less than half
// of the last one; with 1 - beta2 = 0.001, bf16 is already too coarse. So moments are rounded by chance, up with the
// probability of the part that is cut off: the expected value is the unrounded one. The "chance" is a hash of the
// element's own moments and of the step, so it depends on neither place, thread nor instruction set, and a moment
// that the format can hold is kept as it is.
//
// bf16 moments: 8 bits of precision, the range of fp32.
//
// 8-bit moments: bf16 moments, rounded by chance once more. Of a bf16 number's bits the magnitude's upper 11 (exponent
// and 3 of mantissa) are kept, reduced by a base that each block of 64 elements has of its own, so that the block's
// largest element has the highest code. Neighbouring codes are 6.7 to 12.5 % apart; subnormal numbers have none.
// exp_avg_sq has 8 bits: code 0 is zero and nothing else is; what is below the lowest code, 2^-31.7 times the highest,
// is raised to it. exp_avg has a sign and 7 bits; what is below the lowest code, 2^-15.7 times the highest, becomes
// zero. An infinity or NaN makes its whole block NaN. By way of bf16 because 16-bit arithmetic has twice the lanes.
#pragma once

#include "float_formats.inl"
#include "kernels.hpp"

namespace zero_opt {
namespace {

// The param in the upper half of ``high``, and nothing in the lower.
inline float joined_bits(std::uint32_t high, std::int32_t remainder) {
  return float_of(high + static_cast<std::uint32_t>(remainder));
}

inline float joined(std::uint16_t param, std::int16_t remainder) {
  return joined_bits(static_cast<std::uint32_t>(param) << 16, remainder);
}

// The bits of a master that a pair can stand for.
inline std::uint32_t separable(float master) {
  const std::uint32_t bits = bits_of(master);
  return (bits & kMagnitude) > kInfinity ? kQuietNan : bits;
}

constexpr std::uint32_t kRoundParam = 0x8000u;

inline std::uint16_t param_of(std::uint32_t bits) { return static_cast<std::uint16_t>((bits + kRoundParam) >> 16); }

inline void join_master(const std::uint16_t* __restrict__ param, const std::int16_t* __restrict__ remainder,
                        std::int64_t n, float* __restrict__ master) {
  for (std::int64_t i = 0; i < n; ++i) master[i] = joined(param[i], remainder[i]);  // vectorise
}

inline void split_master(const float* __restrict__ master, std::int64_t n, std::uint16_t* __restrict__ param,
                         std::int16_t* __restrict__ remainder) {
  for (std::int64_t i = 0; i < n; ++i) {  // vectorise
    const std::uint32_t bits = separable(master[i]);
    param[i] = param_of(bits);
    remainder[i] = static_cast<std::int16_t>(bits);
  }
}

// 32 bits that are another for every step and pair of moments: for given moments, uniform over all ``dither``.
inline std::uint32_t chance(std::uint32_t exp_avg, std::uint32_t exp_avg_sq, std::uint32_t dither) {
  return ((exp_avg ^ dither) + exp_avg_sq) * 0x9e3779b1u;
}

// Two bf16 numbers in the upper halves of words, and anything below them.
struct Halves {
  std::uint32_t exp_avg, exp_avg_sq;
};

// kShortNan: a NaN among the moments has the payload of a bf16 number or none, and the addition cannot reach the sign.
template <bool kShortNan>
inline Halves rounded_moments(float exp_avg, float exp_avg_sq, std::uint32_t dither) {
  const std::uint32_t drawn = chance(bits_of(exp_avg), bits_of(exp_avg_sq), dither);
  const std::uint32_t raised = bits_of(exp_avg) + (drawn >> 16), raised_sq = bits_of(exp_avg_sq) + (drawn & 0xffffu);
  return {kShortNan || exp_avg == exp_avg ? raised : kQuietNan,
          kShortNan || exp_avg_sq == exp_avg_sq ? raised_sq : kQuietNan};
}

inline void pack_bf16(const float* __restrict__ exp_avg, const float* __restrict__ exp_avg_sq, std::int64_t n,
                      std::uint32_t dither, std::uint16_t* __restrict__ packed, std::uint16_t* __restrict__ packed_sq) {
  for (std::int64_t i = 0; i < n; ++i) {  // vectorise
    const Halves halves = rounded_moments<false>(exp_avg[i], exp_avg_sq[i], dither);
    packed[i] = static_cast<std::uint16_t>(halves.exp_avg >> 16);
    packed_sq[i] = static_cast<std::uint16_t>(halves.exp_avg_sq >> 16);
  }
}

inline void unpack_bf16(const std::uint16_t* __restrict__ from, std::int64_t n, float* __restrict__ to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = bf16_to_float(from[i]);  // vectorise
}

constexpr int kCutBits = 4;  // of a bf16 number: 7 of mantissa less the 3 that are kept
constexpr std::int16_t kHighestCode = 127, kHighestCodeSq = 255, kHalfMagnitude = 0x7fff, kHalfInfinity = 0x7f80;

// The largest magnitude's bits among the elements of a block.
inline std::int16_t largest_bits(const std::uint16_t* half, std::int64_t n) {
  std::int16_t largest = 0;
  for (std::int64_t i = 0; i < n; ++i) {  // vectorise
    const std::int16_t magnitude = static_cast<std::int16_t>(half[i] & kHalfMagnitude);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// What is added to a code to get the upper bits. The lowest code never stands for a subnormal number. A block with
// an infinity or NaN gets the base that makes the highest code a NaN.
inline std::int16_t base_for(std::int32_t largest, std::int32_t highest_code) {
  constexpr std::int32_t kLeast = (1 << 3) - 1;
  const std::int32_t top = (largest + (1 << kCutBits) - 1) >> kCutBits;
  const std::int32_t base = top > highest_code + kLeast ? top - highest_code : kLeast;
  return static_cast<std::int16_t>(largest >= kHalfInfinity ? (kQuietNan >> (16 + kCutBits)) - highest_code : base);
}

// 16 bits, as chance() is 32.
inline std::uint16_t chance_of_halves(std::uint16_t exp_avg, std::uint16_t exp_avg_sq, std::uint16_t dither) {
  const std::uint16_t mixed = static_cast<std::uint16_t>((exp_avg ^ dither) + exp_avg_sq);
  return static_cast<std::uint16_t>(mixed * 0x9e35u);
}

// The code of a magnitude after rounding by the chance of kCutBits bits; less than 1 below the lowest code.
inline std::int16_t code_of(std::uint16_t magnitude, std::uint16_t drawn, std::int16_t base) {
  const std::uint16_t raised = static_cast<std::uint16_t>(magnitude + drawn);
  return static_cast<std::int16_t>(static_cast<std::int16_t>(raised >> kCutBits) - base);
}

struct Block8 {
  std::uint8_t* exp_avg;
  std::uint8_t* exp_avg_sq;
  std::int16_t base, base_sq;
};

// A block of at most kCutNumel elements, all finite.
inline void encode_finite(const std::uint16_t* __restrict__ half, const std::uint16_t* __restrict__ half_sq,
                          std::int64_t n, std::uint32_t dither, const Block8& block) {
  std::uint8_t* __restrict__ packed = block.exp_avg;
  std::uint8_t* __restrict__ packed_sq = block.exp_avg_sq;
  const std::int16_t base = block.base, base_sq = block.base_sq;
  const std::uint16_t dither16 = static_cast<std::uint16_t>(chance(0, 0, ~dither) >> 16);
  for (std::int64_t i = 0; i < n; ++i) {  // vectorise
    const std::uint16_t bits = half[i], bits_sq = half_sq[i] & kHalfMagnitude;
    const std::uint16_t drawn = chance_of_halves(bits, bits_sq, dither16);
    const std::int16_t code = code_of(bits & kHalfMagnitude, drawn >> 12, base);
    const std::int16_t code_sq = code_of(bits_sq, (drawn >> 8) & 15, base_sq);
    const std::int16_t at_least_1 = code_sq < 1 ? 1 : code_sq;
    packed[i] = static_cast<std::uint8_t>((code < 0 ? 0 : code) | ((bits >> 8) & 0x80));
    packed_sq[i] = static_cast<std::uint8_t>(bits_sq == 0 ? 0 : at_least_1);
  }
}

inline void decode(const Block8& block, std::int64_t n, std::uint16_t* __restrict__ half,
                   std::uint16_t* __restrict__ half_sq) {
  const std::uint8_t* __restrict__ packed = block.exp_avg;
  const std::uint8_t* __restrict__ packed_sq = block.exp_avg_sq;
  const std::uint16_t base = static_cast<std::uint16_t>(block.base), base_sq = static_cast<std::uint16_t>(block.base_sq);
  for (std::int64_t i = 0; i < n; ++i) {  // vectorise
    const std::uint16_t code = packed[i] & 0x7f, code_sq = packed_sq[i];
    const std::uint16_t sign = static_cast<std::uint16_t>((packed[i] & 0x80) << 8);
    const std::uint16_t bits = static_cast<std::uint16_t>((code + base) << kCutBits);
    const std::uint16_t bits_sq = static_cast<std::uint16_t>((code_sq + base_sq) << kCutBits);
    half[i] = static_cast<std::uint16_t>((code == 0 ? 0 : bits) | sign);
    half_sq[i] = code_sq == 0 ? 0 : bits_sq;
  }
}

inline void spoil(std::int64_t n, std::int32_t code, std::uint8_t* packed) {
  for (std::int64_t i = 0; i < n; ++i) packed[i] = static_cast<std::uint8_t>(code);
}

// Calls work(start, n) for every block, the last of which may be short.
template <typename Work>
inline void for_blocks(std::int64_t numel, const Work& work) {
  for (std::int64_t start = 0; start < numel; start += kCutNumel) {
    if (numel - start >= kCutNumel) {
      work(start, kCutNumel);  // a constant, from which the compiler makes straight code
    } else {
      work(start, numel - start);
    }
  }
}

// Elements from start, a multiple of kCutNumel, of a run's 8-bit moments, from bf16. All blocks' largest elements are
// found first: one search after the other would wait for its own end.
template <std::int64_t kBlocks>
inline void encode_blocks(const MomentRun& run, std::int64_t start, std::int64_t numel, const std::uint16_t* half,
                          const std::uint16_t* half_sq) {
  std::int16_t largest[kBlocks], largest_sq[kBlocks];
  for_blocks(numel, [&](std::int64_t at, std::int64_t n) {
    largest[at / kCutNumel] = largest_bits(half + at, n);
    largest_sq[at / kCutNumel] = largest_bits(half_sq + at, n);
  });
  for_blocks(numel, [&](std::int64_t at, std::int64_t n) {
    const std::int16_t top = largest[at / kCutNumel], top_sq = largest_sq[at / kCutNumel];
    const Block8 block = {static_cast<std::uint8_t*>(run.exp_avg) + start + at,
                          static_cast<std::uint8_t*>(run.exp_avg_sq) + start + at, base_for(top, kHighestCode),
                          base_for(top_sq, kHighestCodeSq)};
    run.exp_avg_base[(start + at) / kCutNumel] = static_cast<std::uint16_t>(block.base);
    run.exp_avg_sq_base[(start + at) / kCutNumel] = static_cast<std::uint16_t>(block.base_sq);
    encode_finite(half + at, half_sq + at, n, run.dither, block);
    if (top >= kHalfInfinity) spoil(n, kHighestCode, block.exp_avg);
    if (top_sq >= kHalfInfinity) spoil(n, kHighestCodeSq, block.exp_avg_sq);
  });
}

inline void decode_block(const MomentRun& run, std::int64_t start, std::int64_t n, std::uint16_t* half,
                         std::uint16_t* half_sq) {
  const Block8 block = {static_cast<std::uint8_t*>(run.exp_avg) + start,
                        static_cast<std::uint8_t*>(run.exp_avg_sq) + start,
                        static_cast<std::int16_t>(run.exp_avg_base[start / kCutNumel]),
                        static_cast<std::int16_t>(run.exp_avg_sq_base[start / kCutNumel])};
  decode(block, n, half, half_sq);
}

void pack_moments(const MomentRun& run) {
  if (run.format != Format::kBlock8) {
    pack_bf16(run.plain_exp_avg, run.plain_exp_avg_sq, run.numel, run.dither,
              static_cast<std::uint16_t*>(run.exp_avg), static_cast<std::uint16_t*>(run.exp_avg_sq));
    return;
  }
  for_blocks(run.numel, [&](std::int64_t start, std::int64_t n) {
    std::uint16_t half[kCutNumel], half_sq[kCutNumel];
    pack_bf16(run.plain_exp_avg + start, run.plain_exp_avg_sq + start, n, run.dither, half, half_sq);
    encode_blocks<1>(run, start, n, half, half_sq);
  });
}

void unpack_moments(const MomentRun& run) {
  if (run.format != Format::kBlock8) {
    unpack_bf16(static_cast<const std::uint16_t*>(run.exp_avg), run.numel, run.plain_exp_avg);
    unpack_bf16(static_cast<const std::uint16_t*>(run.exp_avg_sq), run.numel, run.plain_exp_avg_sq);
    return;
  }
  for_blocks(run.numel, [&](std::int64_t start, std::int64_t n) {
    std::uint16_t half[kCutNumel], half_sq[kCutNumel];
    decode_block(run, start, n, half, half_sq);
    unpack_bf16(half, n, run.plain_exp_avg + start);
    unpack_bf16(half_sq, n, run.plain_exp_avg_sq + start);
  });
}

}  // namespace
}  // namespace zero_opt
