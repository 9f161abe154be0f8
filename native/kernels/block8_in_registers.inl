// Steps with 8-bit moments, a whole block at a time and in registers: included once by each isa_*.cpp, by
// block_in_registers.inl.
//
// The maths is that of step_loop.inl and compact.inl, over vectors that are spelled out: of a loop that mixes bytes with
// floats the compiler makes one that is bound by moving them between registers. What fits in 16 bits is done there, to
// twice as many elements at a time: codes are decoded and encoded so, but for the rounding by chance, and masters split
// and joined. Only the usual step is here; all others, ends of arrays, and blocks with a number that is not finite go
// through the staging of staged_step.inl, to the same bits.
#pragma once

#include "kernels/avx_formats.inl"
#include "kernels/redo_log.hpp"
#include "kernels/staged_step.inl"

#if defined(ZERO_OPT_HAS_AVX2)

namespace zero_opt {
namespace {

static_assert(kLogNumel == kCutNumel, "a block of the log is one of 8-bit moments");

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
inline bool steps_blocks8(const UpdateRun& run, const StepScalars& scalars) {
  return run.moment_format == Format::kBlock8 && is_usual(scalars, run.from.max_exp_avg_sq != nullptr) &&
         run.grad_format != Format::kFloat16 && !predicts(scalars, run) &&
         (run.out == nullptr || (run.out_format == Format::kBfloat16 && run.from.remainder == nullptr));
}

constexpr std::int64_t kPairNumel = 2 * kAvxNumel, kPairs = kCutNumel / kPairNumel;

// decoded() of pairs.
ZERO_OPT_INLINE AvxPair decoded_pair(const std::uint8_t* codes, std::uint16_t base) {
  const AvxHalves code = widened(reinterpret_cast<const std::int8_t*>(codes));
  const AvxHalves placed = (code << 4) & (std::uint16_t)0x87f0u, based = AvxHalves{} + (std::uint16_t)(base << 4);
  return words_of(AvxHalves{}, raised_where(code, AvxHalves{} + (std::uint16_t)0x7fu, placed, based));
}

ZERO_OPT_INLINE AvxPair decoded_sq_pair(const std::uint8_t* codes, std::uint16_t base) {
  const AvxHalves code = widened(codes), based = AvxHalves{} + (std::uint16_t)(base << 4);
  return words_of(AvxHalves{}, raised_where(code, code, code << 4, based));
}

// Of magnitudes, each raised by what chance gave it, the upper bits, less a base.
ZERO_OPT_INLINE AvxHalves reduced_tops(const AvxPair& magnitudes, const AvxPair& chances, std::uint16_t base) {
  const AvxPair raised = {magnitudes.first + chances.first, magnitudes.second + chances.second};
  return reduced(narrowed({raised.first >> kCutBits, raised.second >> kCutBits}), AvxHalves{} + base);
}

// encoded() and encoded_sq() of a pair of finite moments, of which exp_avg_sq has no sign. ``sign`` has exp_avg's.
struct EncodedPair {
  AvxHalves code, sign, code_sq;
};

ZERO_OPT_INLINE EncodedPair encoded_pair(const AvxPair& m, const AvxPair& v, std::uint32_t dither, std::uint16_t base,
                                         std::uint16_t base_sq) {
  constexpr int kRest = 32 - kCutBits;
  const AvxPair drawn = {chance(m.first, v.first, dither), chance(m.second, v.second, dither)};
  const AvxPair magnitudes = {m.first & kMagnitude, m.second & kMagnitude};
  const AvxHalves code = reduced_tops(magnitudes, {drawn.first >> kRest, drawn.second >> kRest}, base);
  const AvxHalves code_sq = reduced_tops(v, {drawn.first & kCutMask, drawn.second & kCutMask}, base_sq);
  const AvxHalves least = smaller(narrowed(v), AvxHalves{} + (std::uint16_t)1u);  // 0 is the code of zero alone
  return {code, narrowed_signed(m), larger(code_sq, least)};
}

// The new state of a block as it goes home, in registers.
struct SteppedBlock8 {
  AvxWords masters[2 * kPairs];  // of split ones all params' halves, and then all remainders
  AvxWords codes[kPairs / 2], codes_sq[kPairs / 2];
  std::uint16_t base, base_sq;
};

// n vectors between registers and an array.
template <bool kPast>
ZERO_OPT_INLINE void put_vectors(const AvxWords* vectors, std::int64_t n, void* array) {
  for (std::int64_t i = 0; i < n; ++i) {
    char* const to = static_cast<char*>(array) + i * static_cast<std::int64_t>(sizeof(AvxWords));
    kPast ? stream(vectors[i], to) : store(vectors[i], to);
  }
}

// A block with a number that is not finite, and then what was made of it, from a log.
__attribute__((noinline)) std::int64_t step_staged(const StepScalars& scalars, const UpdateRun& block) {
  Staging staging;
  return update_by_staging(scalars, block, 0, kCutNumel, staging);
}

__attribute__((noinline)) void copy_staged(const StateArrays& log, const StateArrays& home) {
  const bool split = home.remainder != nullptr;
  __builtin_memcpy(home.param, log.param, kCutNumel * (split ? 2 : 4));
  if (split) __builtin_memcpy(home.remainder, log.remainder, kCutNumel * 2);
  __builtin_memcpy(home.exp_avg, log.exp_avg, kCutNumel);
  __builtin_memcpy(home.exp_avg_sq, log.exp_avg_sq, kCutNumel);
  *home.exp_avg_base = *log.exp_avg_base;
  *home.exp_avg_sq_base = *log.exp_avg_sq_base;
}

// As BlockInRegisters, for runs with 8-bit moments. No function that is called may have its address, which would keep
// what it holds out of registers.
template <bool kHalfGrad, bool kSplit>
struct Block8InRegisters {
  StepScalars scalars;
  AdamScalars adam;
  UpdateRun run;
  std::int64_t begin;
  bool streams, past_caches = false, staged = false;  // whether the last block was not finite
  SteppedBlock8 block;                                // the last one, unless it was not

  Block8InRegisters(const StepScalars& given, const UpdateRun& whole, std::int64_t first)
      : scalars(given), adam(adam_in(given)), run(whole), begin(first) {
    const std::uintptr_t out = reinterpret_cast<std::uintptr_t>(static_cast<std::uint16_t*>(run.out) + begin);
    streams = run.numel >= kStreamNumel && out % kLine == 0;
  }

  // A block into the arrays it was read from. Returns how many of its gradients are not finite.
  ZERO_OPT_INLINE std::int64_t step() { return step_to(home_arrays()); }

  // The same, into a log; in registers it stays.
  ZERO_OPT_INLINE std::int64_t step(LogBlock& log) {
    return step_to(log_arrays(log));
  }

  // Blocks go home past the caches from here on, if they are whole lines there.
  void leave_caches() {
    const StateArrays home = home_arrays();
    const auto place = [](const void* array) { return reinterpret_cast<std::uintptr_t>(array); };
    const std::uintptr_t moments = place(home.exp_avg) | place(home.exp_avg_sq);
    past_caches = (place(home.param) | place(home.remainder) | moments) % kLine == 0;
  }

  ZERO_OPT_INLINE void home(LogBlock& log) {
    const StateArrays home = home_arrays();
    if (__builtin_expect(staged, 0)) {
      copy_staged(log_arrays(log), home);
    } else {
      past_caches ? write<true>(home) : write<false>(home);
    }
  }

  ZERO_OPT_INLINE void next() { begin += kCutNumel; }

 private:
  // Where the block is.
  ZERO_OPT_INLINE StateArrays home_arrays() const {
    return {static_cast<char*>(run.from.param) + begin * (kSplit ? 2 : 4),
            kSplit ? run.from.remainder + begin : nullptr,
            static_cast<std::uint8_t*>(run.from.exp_avg) + begin,
            static_cast<std::uint8_t*>(run.from.exp_avg_sq) + begin,
            run.from.exp_avg_base + begin / kCutNumel,
            run.from.exp_avg_sq_base + begin / kCutNumel,
            nullptr};
  }

  ZERO_OPT_INLINE const void* grad() const {
    return static_cast<const char*>(run.grad) + begin * (kHalfGrad ? 2 : 4);
  }

  static ZERO_OPT_INLINE StateArrays log_arrays(LogBlock& log) {
    return {log.param,           kSplit ? log.remainder : nullptr, log.exp_avg, log.exp_avg_sq, log.exp_avg_base,
            log.exp_avg_sq_base, nullptr};
  }

  ZERO_OPT_INLINE std::int64_t step_to(const StateArrays& to) {
    staged = !step_finite(home_arrays());
    if (__builtin_expect(staged, 0)) {
      const UpdateRun alone = {kCutNumel,       home_arrays(),     to,            grad(), out(),
                             run.grad_format, run.moment_format, run.out_format};
      const StepScalars given = scalars;
      return step_staged(given, alone);
    }
    write<false>(to);
    return 0;
  }

  ZERO_OPT_INLINE std::uint16_t* out() const {
    return run.out == nullptr ? nullptr : static_cast<std::uint16_t*>(run.out) + begin;
  }

  // A pair of vectors of an array of fp32 numbers.
  static ZERO_OPT_INLINE AvxPair pair_at(const void* array, std::int64_t pair) {
    const float* const from = static_cast<const float*>(array) + pair * kPairNumel;
    return paired((AvxWords)read_floats_at(from), (AvxWords)read_floats_at(from + kAvxNumel));
  }

  // Of an array of 16-bit numbers, a vector of as many.
  static ZERO_OPT_INLINE AvxHalves halves_at(const void* array, std::int64_t pair) {
    return read_halves_at(static_cast<const std::uint16_t*>(array) + pair * kPairNumel);
  }

  // The next state of the block; false, and nothing of it but ``out`` is right, if some of it is not finite.
  ZERO_OPT_INLINE bool step_finite(const StateArrays& home) {
    Element<AvxFloats> decayed[2 * kPairs];
    const std::uint32_t both = decay(home, decayed), largest = both << 16, largest_sq = both & kUpper;
    block.base = static_cast<std::uint16_t>(finite_base(largest, kHighestCode));
    block.base_sq = static_cast<std::uint16_t>(finite_base(largest_sq, kHighestCodeSq));
    move_and_encode(decayed);
    return largest < kInfinity && largest_sq < kInfinity;
  }

  // What of the step needs no divider: the rest of it is long, and has the encoding beside it. Returns largest_halves.
  ZERO_OPT_INLINE std::uint32_t decay(const StateArrays& home, Element<AvxFloats>* decayed) const {
    const std::uint8_t* const codes = static_cast<const std::uint8_t*>(home.exp_avg);
    const std::uint8_t* const codes_sq = static_cast<const std::uint8_t*>(home.exp_avg_sq);
    const std::uint16_t base = *home.exp_avg_base, base_sq = *home.exp_avg_sq_base;
    AvxInts most = {}, most_sq = {};
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < kPairs; ++i) {
      const AvxPair p =
          kSplit ? joined(halves_at(home.param, i), halves_at(home.remainder, i)) : pair_at(home.param, i);
      const AvxPair g = kHalfGrad ? words_of(AvxHalves{}, halves_at(grad(), i)) : pair_at(grad(), i);
      const AvxPair m = decoded_pair(codes + i * kPairNumel, base);
      const AvxPair v = decoded_sq_pair(codes_sq + i * kPairNumel, base_sq);
      decayed[2 * i] = decayed_vector(g.first, p.first, m.first, v.first, most, most_sq);
      decayed[2 * i + 1] = decayed_vector(g.second, p.second, m.second, v.second, most, most_sq);
    }
    return largest_halves(most, most_sq);
  }

  ZERO_OPT_INLINE Element<AvxFloats> decayed_vector(AvxWords g, AvxWords param, AvxWords exp_avg, AvxWords exp_avg_sq,
                                                    AvxInts& most, AvxInts& most_sq) const {
    const Element<AvxFloats> old = {(AvxFloats)param, (AvxFloats)exp_avg, (AvxFloats)exp_avg_sq, AvxFloats{}};
    const Element<AvxFloats> next = UsualUpdate::decayed(adam, scalars.grad_factor * (AvxFloats)g, old);
    const AvxInts magnitude = (AvxInts)((AvxWords)next.exp_avg & kMagnitude);
    // Never negative; a NaN with a sign can only come from a gradient that makes exp_avg one too.
    const AvxInts magnitude_sq = (AvxInts)next.exp_avg_sq;
    most = magnitude > most ? magnitude : most;
    most_sq = magnitude_sq > most_sq ? magnitude_sq : most_sq;
    return next;
  }

  ZERO_OPT_INLINE void move_and_encode(const Element<AvxFloats>* decayed) {
    EncodedPair encoded[kPairs];
    AvxPair masters[kPairs];
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < kPairs; ++i) {
      const Element<AvxFloats>&first = decayed[2 * i], &second = decayed[2 * i + 1];
      masters[i] = {moved(first), moved(second)};
      const AvxPair m = {(AvxWords)first.exp_avg, (AvxWords)second.exp_avg};
      const AvxPair v = {(AvxWords)first.exp_avg_sq, (AvxWords)second.exp_avg_sq};
      encoded[i] = encoded_pair(m, v, scalars.dither, block.base, block.base_sq);
      if (i % 2 != 0) {
        const EncodedPair &a = encoded[i - 1], &b = encoded[i];
        const AvxWords signs = narrowed_signed(a.sign, b.sign) & 0x80808080u;
        block.codes[i / 2] = in_order(narrowed(a.code, b.code) | signs);
        block.codes_sq[i / 2] = in_order(narrowed(a.code_sq, b.code_sq));
      }
      keep_master(masters[i], i);
    }
    if (!kSplit && run.out != nullptr) write_out(masters);
  }

  ZERO_OPT_INLINE AvxWords moved(const Element<AvxFloats>& decayed) const {
    const AvxFloats denominator = UsualUpdate::denominator<true>(adam, decayed);
    return (AvxWords)UsualUpdate::moved(adam, decayed, denominator);
  }

  // As it goes home.
  ZERO_OPT_INLINE void keep_master(const AvxPair& master, std::int64_t pair) {
    if constexpr (kSplit) {
      const AvxPair bits = separable(master);
      const AvxHalves lower = lower_halves(bits);
      block.masters[pair] = (AvxWords)(upper_halves(bits) + (lower >> 15));
      block.masters[kPairs + pair] = (AvxWords)lower;
    } else {
      const AvxPair whole = unpaired(master);
      block.masters[2 * pair] = whole.first;
      block.masters[2 * pair + 1] = whole.second;
    }
  }

  ZERO_OPT_INLINE void write_out(const AvxPair* masters) const {
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < kPairs; ++i) {
      const AvxWords halves = (AvxWords)bf16_of(masters[i]);
      streams ? stream(halves, out() + i * kPairNumel) : store(halves, out() + i * kPairNumel);
    }
  }

  template <bool kPast>
  ZERO_OPT_INLINE void write(const StateArrays& to) const {
    constexpr std::int64_t kParams = kSplit ? kPairs : 2 * kPairs;
    put_vectors<kPast>(block.masters, kParams, to.param);
    if constexpr (kSplit) put_vectors<kPast>(block.masters + kPairs, kPairs, to.remainder);
    put_vectors<kPast>(block.codes, kPairs / 2, to.exp_avg);
    put_vectors<kPast>(block.codes_sq, kPairs / 2, to.exp_avg_sq);
    *to.exp_avg_base = block.base;
    *to.exp_avg_sq_base = block.base_sq;
  }
};

// Calls ``use`` with the run's own Block8InRegisters, at element begin.
template <typename Use>
void with_block8_in_registers(const StepScalars& scalars, const UpdateRun& run, std::int64_t begin, const Use& use) {
  const bool half = run.grad_format == Format::kBfloat16, split = run.from.remainder != nullptr;
  if (half && split) use(Block8InRegisters<true, true>(scalars, run, begin));
  if (half && !split) use(Block8InRegisters<true, false>(scalars, run, begin));
  if (!half && split) use(Block8InRegisters<false, true>(scalars, run, begin));
  if (!half && !split) use(Block8InRegisters<false, false>(scalars, run, begin));
}

}  // namespace
}  // namespace zero_opt
#endif
