// Compact forms of the optimizer state: included once by each isa_*.cpp, like step_loop.inl.
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
// 8-bit moments: of an fp32 number's bits the magnitude's upper 11 (exponent and 3 of mantissa) are kept, reduced by a
// base that each block of 64 elements has of its own, so that the block's largest element has the highest code.
// Neighbouring codes are 6.7 to 12.5 % apart; subnormal numbers have none. exp_avg_sq has 8 bits: code 0 is zero and
// nothing else is; what is below the lowest code, 2^-31.7 times the highest, is raised to it. exp_avg has a sign and 7
// bits; what is below the lowest code, 2^-15.7 times the highest, becomes zero. An infinity or NaN makes its whole block
// NaN. What is done with an element is a template, of words or of vectors of words.
#pragma once

#include "kernels/float_formats.inl"
#include "kernels/kernels.hpp"

namespace zero_opt {
namespace {

// The param in the upper half of ``high``, and nothing in the lower. No step leaves a remainder below 0 beside a param
// of 0, of which it would make a NaN: that is where the user has written the 0, and the remainder is another value's.
inline float joined_bits(std::uint32_t high, std::int32_t remainder) {
  const bool written = high << 1 == 0 && remainder < 0;
  return float_of(high + static_cast<std::uint32_t>(written ? 0 : remainder));
}

inline float joined(std::uint16_t param, std::int16_t remainder) {
  return joined_bits(static_cast<std::uint32_t>(param) << 16, remainder);
}

// The bits of a master that a pair can stand for.
template <typename Word, typename Value>
inline Word separable(Value master) {
  return master == master ? words_of(master) : Word{} + kQuietNan;
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
    const std::uint32_t bits = separable<std::uint32_t>(master[i]);
    param[i] = param_of(bits);
    remainder[i] = static_cast<std::int16_t>(bits);
  }
}

// 32 bits that are another for every step and pair of moments: for given moments, uniform over all ``dither``.
template <typename Word>
inline Word chance(Word exp_avg, Word exp_avg_sq, std::uint32_t dither) {
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

constexpr int kCutBits = 20;  // of an fp32 number: 23 of mantissa less the 3 that are kept
constexpr std::uint32_t kCutMask = (1u << kCutBits) - 1;
constexpr std::int32_t kHighestCode = 127, kHighestCodeSq = 255;

// The largest magnitude's bits among the elements of a block.
inline std::int32_t largest_bits(const float* values, std::int64_t n) {
  std::int32_t largest = 0;
  for (std::int64_t i = 0; i < n; ++i) {  // vectorise
    const std::int32_t magnitude = static_cast<std::int32_t>(bits_of(values[i]) & kMagnitude);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// What is added to a code to get the upper bits. The lowest code never stands for a subnormal number. A block with
// an infinity or NaN gets the base that makes the highest code a NaN.
inline std::int32_t finite_base(std::uint32_t largest, std::int32_t highest_code) {
  constexpr std::int32_t kLeast = (1 << 3) - 1;
  const std::int32_t top = static_cast<std::int32_t>((largest + kCutMask) >> kCutBits);
  return top > highest_code + kLeast ? top - highest_code : kLeast;
}

inline std::int32_t base_for(std::uint32_t largest, std::int32_t highest_code) {
  const std::int32_t of_nan = static_cast<std::int32_t>(kQuietNan >> kCutBits) - highest_code;
  return largest >= kInfinity ? of_nan : finite_base(largest, highest_code);
}

// The code of an exp_avg, given its bits and those of chance(). Int is Word with a sign.
template <typename Int, typename Word>
inline Word encoded(Word bits, Word drawn, std::int32_t base) {
  const Int code = (Int)(((bits & kMagnitude) + (drawn >> (32 - kCutBits))) >> kCutBits) - base;
  return (Word)(code > 0 ? code : Int{}) | ((bits >> 24) & 0x80u);
}

template <typename Int, typename Word>
inline Word encoded_sq(Word magnitude, Word drawn, std::int32_t base) {
  const Int code = (Int)((magnitude + (drawn & kCutMask)) >> kCutBits) - base;
  return magnitude == 0 ? Word{} : (Word)(code > 1 ? code : Int{} + 1);
}

// The bits of an exp_avg.
template <typename Word>
inline Word decoded(Word code, std::uint32_t base) {
  const Word magnitude = code & 0x7fu;
  return (magnitude == 0 ? Word{} : (magnitude + base) << kCutBits) | ((code << 24) & ~kMagnitude);
}

template <typename Word>
inline Word decoded_sq(Word code, std::uint32_t base) {
  return code == 0 ? Word{} : (code + base) << kCutBits;
}

struct Block8 {
  std::uint8_t* exp_avg;
  std::uint8_t* exp_avg_sq;
  std::int32_t base, base_sq;
};

// A block of at most kCutNumel elements, all finite.
inline void encode_finite(const float* __restrict__ exp_avg, const float* __restrict__ exp_avg_sq, std::int64_t n,
                          std::uint32_t dither, const Block8& block) {
  std::uint8_t* __restrict__ packed = block.exp_avg;
  std::uint8_t* __restrict__ packed_sq = block.exp_avg_sq;
  const std::int32_t base = block.base, base_sq = block.base_sq;
  for (std::int64_t i = 0; i < n; ++i) {  // vectorise
    const std::uint32_t bits = bits_of(exp_avg[i]), bits_sq = bits_of(exp_avg_sq[i]);
    const std::uint32_t drawn = chance(bits, bits_sq, dither);
    packed[i] = static_cast<std::uint8_t>(encoded<std::int32_t>(bits, drawn, base));
    packed_sq[i] = static_cast<std::uint8_t>(encoded_sq<std::int32_t>(bits_sq & kMagnitude, drawn, base_sq));
  }
}

inline void decode(const Block8& block, std::int64_t n, float* __restrict__ exp_avg, float* __restrict__ exp_avg_sq) {
  const std::uint8_t* __restrict__ packed = block.exp_avg;
  const std::uint8_t* __restrict__ packed_sq = block.exp_avg_sq;
  const std::uint32_t base = static_cast<std::uint32_t>(block.base), base_sq = static_cast<std::uint32_t>(block.base_sq);
  for (std::int64_t i = 0; i < n; ++i) {  // vectorise
    exp_avg[i] = float_of(decoded<std::uint32_t>(packed[i], base));
    exp_avg_sq[i] = float_of(decoded_sq<std::uint32_t>(packed_sq[i], base_sq));
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
      work(start, kCutNumel);  // a constant, from which the compiler makes straight-line code
    } else {
      work(start, numel - start);
    }
  }
}

// A block of a run's 8-bit moments from element start on, a multiple of kCutNumel.
inline Block8 block_at(const MomentRun& run, std::int64_t start) {
  return {static_cast<std::uint8_t*>(run.exp_avg) + start, static_cast<std::uint8_t*>(run.exp_avg_sq) + start,
          run.exp_avg_base[start / kCutNumel], run.exp_avg_sq_base[start / kCutNumel]};
}

inline MomentRun blocks_of(const UpdateRun& run, const StateArrays& arrays, std::uint32_t dither) {
  return {run.numel,           run.moment_format,      dither,  arrays.exp_avg, arrays.exp_avg_sq,
          arrays.exp_avg_base, arrays.exp_avg_sq_base, nullptr, nullptr};
}

inline void encode_block(const MomentRun& run, std::int64_t start, std::int64_t n, const float* exp_avg,
                         const float* exp_avg_sq) {
  const std::int32_t top = largest_bits(exp_avg, n), top_sq = largest_bits(exp_avg_sq, n);
  run.exp_avg_base[start / kCutNumel] = static_cast<std::uint16_t>(base_for(top, kHighestCode));
  run.exp_avg_sq_base[start / kCutNumel] = static_cast<std::uint16_t>(base_for(top_sq, kHighestCodeSq));
  const Block8 block = block_at(run, start);
  encode_finite(exp_avg, exp_avg_sq, n, run.dither, block);
  if (top >= static_cast<std::int32_t>(kInfinity)) spoil(n, kHighestCode, block.exp_avg);
  if (top_sq >= static_cast<std::int32_t>(kInfinity)) spoil(n, kHighestCodeSq, block.exp_avg_sq);
}

inline void encode_blocks(const MomentRun& run, std::int64_t start, std::int64_t numel, const float* exp_avg,
                          const float* exp_avg_sq) {
  for_blocks(numel, [&](std::int64_t at, std::int64_t n) {
    encode_block(run, start + at, n, exp_avg + at, exp_avg_sq + at);
  });
}

inline void decode_blocks(const MomentRun& run, std::int64_t start, std::int64_t numel, float* exp_avg,
                          float* exp_avg_sq) {
  for_blocks(numel, [&](std::int64_t at, std::int64_t n) {
    decode(block_at(run, start + at), n, exp_avg + at, exp_avg_sq + at);
  });
}

void pack_moments(const MomentRun& run) {
  if (run.format == Format::kBlock8) {
    encode_blocks(run, 0, run.numel, run.plain_exp_avg, run.plain_exp_avg_sq);
  } else {
    pack_bf16(run.plain_exp_avg, run.plain_exp_avg_sq, run.numel, run.dither,
              static_cast<std::uint16_t*>(run.exp_avg), static_cast<std::uint16_t*>(run.exp_avg_sq));
  }
}

void unpack_moments(const MomentRun& run) {
  if (run.format == Format::kBlock8) {
    decode_blocks(run, 0, run.numel, run.plain_exp_avg, run.plain_exp_avg_sq);
  } else {
    unpack_bf16(static_cast<const std::uint16_t*>(run.exp_avg), run.numel, run.plain_exp_avg);
    unpack_bf16(static_cast<const std::uint16_t*>(run.exp_avg_sq), run.numel, run.plain_exp_avg_sq);
  }
}

}  // namespace
}  // namespace zero_opt
