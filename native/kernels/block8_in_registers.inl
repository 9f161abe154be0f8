// Steps with 8-bit moments, a whole block at a time and in registers: included once by each isa_*.cpp, by
// staged_step.inl.
//
// The maths is that of adam.inl and compact.inl, over vectors that are spelled out: of a loop that mixes bytes with floats
// the compiler makes one that is bound by moving them between registers. Only the usual step is here; all others, ends
// of arrays, and blocks with a number that is not finite go through the staging of staged_step.inl, to the same bits.
#pragma once

#include "kernels/adam.inl"
#include "kernels/avx_formats.inl"
#include "kernels/compact.inl"

#if defined(ZERO_OPT_HAS_AVX2)

namespace zero_opt {
namespace {

// Of every lane the magnitudes' upper halves, rounded up, side by side in a word, and of those the largest: base_for
// takes no more of them.
inline std::uint32_t largest_halves(AvxInts magnitude, AvxInts magnitude_sq) {
  const AvxWords up = (AvxWords)magnitude + 0xffffu, up_sq = (AvxWords)magnitude_sq + 0xffffu;
  const __m256i quarter = largest_of_halves(up >> 16 | (up_sq & kUpper));
  __m128i most = _mm_max_epu16(_mm256_castsi256_si128(quarter), _mm256_extracti128_si256(quarter, 1));
  most = _mm_max_epu16(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epu16(most, _mm_shuffle_epi32(most, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(most));
}

// Whether whole blocks of a run can be stepped here.
inline bool steps_blocks8(const AdamScalars& scalars, const AdamRun& run) {
  return run.moment_format == Format::kBlock8 && is_usual(scalars, run.from.max_exp_avg_sq != nullptr) &&
         run.grad_format != Format::kFloat16 && (run.out == nullptr || run.out_format == Format::kBfloat16);
}

constexpr std::int64_t kParts = kCutNumel / kAvxNumel;

// The new state of a block, in registers.
struct SteppedBlock8 {
  AvxFloats param[kParts], exp_avg[kParts], exp_avg_sq[kParts];
  std::uint32_t largest;  // see largest_halves
};

template <bool kHalfGrad, bool kSplit>
ZERO_OPT_INLINE void step_block8(const AdamScalars& s, const AdamRun& run, const Block8& from, std::int64_t start,
                                 SteppedBlock8& block) {
  const float* params = static_cast<const float*>(run.from.param) + start;
  const std::uint16_t* halves = static_cast<const std::uint16_t*>(run.from.param) + start;
  const std::int16_t* remainders = run.from.remainder + start;
  const float* grad = static_cast<const float*>(run.grad) + start;
  const std::uint16_t* half_grad = static_cast<const std::uint16_t*>(run.grad) + start;
  AvxInts most, most_sq;
#pragma GCC unroll 8
  for (std::int64_t part = 0; part < kParts; ++part) {
    const std::int64_t at = part * kAvxNumel;
    Element<AvxFloats> old;
    if constexpr (kSplit) {
      old.param = joined_at(halves + at, remainders + at);
    } else {
      old.param = read_floats_at(params + at);
    }
    old.exp_avg = (AvxFloats)decoded(widened(from.exp_avg + at), static_cast<std::uint32_t>(from.base));
    old.exp_avg_sq = (AvxFloats)decoded_sq(widened(from.exp_avg_sq + at), static_cast<std::uint32_t>(from.base_sq));
    AvxFloats g;
    if constexpr (kHalfGrad) {
      g = (AvxFloats)(widened(half_grad + at) << 16);
    } else {
      g = read_floats_at(grad + at);
    }
    const Element<AvxFloats> stepped = UsualUpdate::step<true>(s, s.grad_factor * g, old);
    block.param[part] = stepped.param;
    block.exp_avg[part] = stepped.exp_avg;
    block.exp_avg_sq[part] = stepped.exp_avg_sq;
    const AvxInts magnitude = (AvxInts)((AvxWords)stepped.exp_avg & kMagnitude);
    // Never negative; a NaN with a sign can only come from a gradient that makes exp_avg one too.
    const AvxInts magnitude_sq = (AvxInts)stepped.exp_avg_sq;
    most = part == 0 ? magnitude : (magnitude > most ? magnitude : most);
    most_sq = part == 0 ? magnitude_sq : (magnitude_sq > most_sq ? magnitude_sq : most_sq);
  }
  block.largest = largest_halves(most, most_sq);
}

ZERO_OPT_INLINE void write_moments(const SteppedBlock8& block, std::uint32_t dither, const Block8& to) {
#pragma GCC unroll 2
  for (std::int64_t first = 0; first < kParts; first += 4) {
    AvxWords codes[4], codes_sq[4];
#pragma GCC unroll 4
    for (std::int64_t part = 0; part < 4; ++part) {
      const AvxWords bits = (AvxWords)block.exp_avg[first + part], bits_sq = (AvxWords)block.exp_avg_sq[first + part];
      const AvxWords drawn = chance(bits, bits_sq, dither);
      codes[part] = encoded<AvxInts>(bits, drawn, to.base);
      codes_sq[part] = encoded_sq<AvxInts>(bits_sq, drawn, to.base_sq);
    }
    store(bytes_of(codes), to.exp_avg + first * kAvxNumel);
    store(bytes_of(codes_sq), to.exp_avg_sq + first * kAvxNumel);
  }
}

template <bool kSplit>
ZERO_OPT_INLINE void write_params(const SteppedBlock8& block, const AdamRun& run, std::int64_t start, bool streams) {
  std::uint16_t* const out = static_cast<std::uint16_t*>(run.out);
#pragma GCC unroll 4
  for (std::int64_t part = 0; part < kParts; part += 2) {
    const std::int64_t at = start + part * kAvxNumel;
    const AvxFloats first = block.param[part], second = block.param[part + 1];
    if constexpr (kSplit) {
      write_split(first, second, static_cast<std::uint16_t*>(run.to.param) + at, run.to.remainder + at);
    } else {
      store(first, static_cast<float*>(run.to.param) + at);
      store(second, static_cast<float*>(run.to.param) + at + kAvxNumel);
    }
    if (out != nullptr) write_bf16(first, second, out + at, streams);
  }
}

// Steps whole blocks from element start to end, up to the first with a number that is not finite, which stays as it is.
// Returns how many.
template <bool kHalfGrad, bool kSplit>
std::int64_t adam_blocks8_of(const AdamScalars& scalars, const AdamRun& run, std::int64_t start, std::int64_t end) {
  const AdamScalars s = scalars;
  const MomentRun from = blocks_of(run, run.from, 0), to = blocks_of(run, run.to, 0);
  const std::int64_t count = (end - start) / kCutNumel;
  const std::uintptr_t first_out = reinterpret_cast<std::uintptr_t>(static_cast<std::uint16_t*>(run.out) + start);
  const bool streams = run.numel >= kStreamNumel && first_out % kLine == 0;
  for (std::int64_t number = 0; number < count; ++number, start += kCutNumel) {
    SteppedBlock8 block;
    step_block8<kHalfGrad, kSplit>(s, run, block_at(from, start), start, block);
    const std::uint32_t largest = block.largest << 16, largest_sq = block.largest & kUpper;
    if (__builtin_expect(largest >= kInfinity || largest_sq >= kInfinity, 0)) return number;
    to.exp_avg_base[start / kCutNumel] = static_cast<std::uint16_t>(base_for(largest, kHighestCode));
    to.exp_avg_sq_base[start / kCutNumel] = static_cast<std::uint16_t>(base_for(largest_sq, kHighestCodeSq));
    write_params<kSplit>(block, run, start, streams);
    write_moments(block, s.dither, block_at(to, start));
  }
  return count;
}

std::int64_t adam_blocks8(const AdamScalars& scalars, const AdamRun& run, std::int64_t start, std::int64_t end) {
  const bool half = run.grad_format == Format::kBfloat16;
  if (run.from.remainder != nullptr) {
    return half ? adam_blocks8_of<true, true>(scalars, run, start, end)
                : adam_blocks8_of<false, true>(scalars, run, start, end);
  }
  return half ? adam_blocks8_of<true, false>(scalars, run, start, end)
              : adam_blocks8_of<false, false>(scalars, run, start, end);
}

}  // namespace
}  // namespace zero_opt
#endif
