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
  const AvxHalves placed = (code << 4) & (std::uint16_t)0x87f0u, based = (AvxHalves{} + base) << 4;
  return words_of(AvxHalves{}, raised_where(code, AvxHalves{} + (std::uint16_t)0x7fu, placed, based));
}

ZERO_OPT_INLINE AvxPair decoded_sq_pair(const std::uint8_t* codes, std::uint16_t base) {
  const AvxHalves code = widened(codes), based = (AvxHalves{} + base) << 4;
  return words_of(AvxHalves{}, raised_where(code, code, code << 4, based));
}

// encoded() and encoded_sq() of a pair of finite moments, of which exp_avg_sq has no sign. ``sign`` has exp_avg's.
struct EncodedPair {
  AvxHalves code, sign, code_sq;
};

ZERO_OPT_INLINE EncodedPair encoded_pair(const AvxPair& m, const AvxPair& v, std::uint32_t dither, std::uint16_t base,
                                         std::uint16_t base_sq) {
  constexpr int kRest = 32 - kCutBits;
  const AvxPair drawn = {chance(m.first, v.first, dither), chance(m.second, v.second, dither)};
  // What a finite number is raised by does not reach its sign, which is shifted with the number.
  const AvxInts first = (AvxInts)(m.first + (drawn.first >> kRest)) >> kCutBits;
  const AvxInts second = (AvxInts)(m.second + (drawn.second >> kRest)) >> kCutBits;
  const AvxHalves tops = narrowed_signed({(AvxWords)first, (AvxWords)second});
  const AvxWords first_sq = (v.first + (drawn.first & kCutMask)) >> kCutBits;
  const AvxWords second_sq = (v.second + (drawn.second & kCutMask)) >> kCutBits;
  const AvxHalves least = smaller(narrowed(v), AvxHalves{} + (std::uint16_t)1u);  // 0 is the code of zero alone
  return {reduced(tops & (std::uint16_t)0x7ffu, AvxHalves{} + base), tops,
          larger(reduced(narrowed({first_sq, second_sq}), AvxHalves{} + base_sq), least)};
}

// Where a log has a block's state.
inline StateArrays arrays_in(LogBlock& log, bool split) {
  return {log.param,           split ? log.remainder : nullptr, log.exp_avg, log.exp_avg_sq, log.exp_avg_base,
          log.exp_avg_sq_base, nullptr};
}

// Where the block from element begin on is.
inline StateArrays arrays_at(const StateArrays& all, std::int64_t begin) {
  const bool split = all.remainder != nullptr;
  const std::uint64_t block = static_cast<std::uint64_t>(begin) / kCutNumel;
  return {static_cast<char*>(all.param) + begin * (split ? 2 : 4),
          split ? all.remainder + begin : nullptr,
          static_cast<std::uint8_t*>(all.exp_avg) + begin,
          static_cast<std::uint8_t*>(all.exp_avg_sq) + begin,
          all.exp_avg_base + block,
          all.exp_avg_sq_base + block,
          nullptr};
}

// A block with a number that is not finite, into a log if there is one. Its addresses are computed here: beside those
// of the usual blocks, the compiler would keep all of them in vectors.
__attribute__((noinline)) std::int64_t step_staged(const StepScalars& scalars, UpdateRun run, std::int64_t begin,
                                                   LogBlock* log) {
  run.grad = static_cast<const char*>(run.grad) + begin * bytes_of(run.grad_format);
  if (run.out != nullptr) run.out = static_cast<char*>(run.out) + begin * bytes_of(run.out_format);
  run.from = arrays_at(run.from, begin);
  run.to = log == nullptr ? run.from : arrays_in(*log, run.from.remainder != nullptr);
  run.numel = kCutNumel;
  Staging staging;
  return update_by_staging(scalars, run, 0, kCutNumel, staging);
}

// n vectors from one array to another.
template <bool kPast, std::int64_t n>
ZERO_OPT_INLINE void copy_vectors(const void* array, void* home) {
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t at = i * static_cast<std::int64_t>(sizeof(AvxWords));
    AvxWords words;
    __builtin_memcpy(&words, static_cast<const char*>(array) + at, sizeof(words));
    char* const to = static_cast<char*>(home) + at;
    kPast ? stream(words, to) : store(words, to);
  }
}

// As BlockInRegisters, for runs with 8-bit moments. No function that is called may have its address, which would keep
// what it holds out of registers.
template <bool kHalfGrad, bool kSplit>
struct Block8InRegisters {
  StepScalars scalars;
  AdamScalars adam;
  UpdateRun run;
  std::int64_t begin;
  bool streams, past_caches = false;

  Block8InRegisters(const StepScalars& given, const UpdateRun& whole, std::int64_t first)
      : scalars(given), adam(adam_in(given)), run(whole), begin(first) {
    const std::uintptr_t out = reinterpret_cast<std::uintptr_t>(static_cast<std::uint16_t*>(run.out) + begin);
    streams = run.numel >= kStreamNumel && out % kLine == 0;
  }

  // A block into the arrays it was read from. Returns how many of its gradients are not finite.
  ZERO_OPT_INLINE std::int64_t step() { return step_to(nullptr); }

  // The same, into a log.
  ZERO_OPT_INLINE std::int64_t step(LogBlock& log) { return step_to(&log); }

  // Blocks go home past the caches from here on, if they are whole lines there.
  void leave_caches() {
    const StateArrays home = home_arrays();
    const auto place = [](const void* array) { return reinterpret_cast<std::uintptr_t>(array); };
    const std::uintptr_t moments = place(home.exp_avg) | place(home.exp_avg_sq);
    past_caches = (place(home.param) | place(home.remainder) | moments) % kLine == 0;
  }

  ZERO_OPT_INLINE void home(const LogBlock& log) const { past_caches ? copy<true>(log) : copy<false>(log); }

  ZERO_OPT_INLINE void next() { begin += kCutNumel; }

 private:
  ZERO_OPT_INLINE StateArrays home_arrays() const { return arrays_at(run.from, begin); }

  ZERO_OPT_INLINE const void* grad() const {
    return static_cast<const char*>(run.grad) + begin * (kHalfGrad ? 2 : 4);
  }

  ZERO_OPT_INLINE std::int64_t step_to(LogBlock* log) const {
    const StateArrays home = home_arrays(), to = log == nullptr ? home : arrays_in(*log, kSplit);
    MomentPair next[kPairs];
    const std::uint32_t both = decay(home, next), largest = both << 16, largest_sq = both & kUpper;
    if (__builtin_expect(largest >= kInfinity || largest_sq >= kInfinity, 0)) {
      const StepScalars given = scalars;
      const UpdateRun whole = run;
      return step_staged(given, whole, begin, log);
    }
    const std::uint16_t base = static_cast<std::uint16_t>(finite_base(largest, kHighestCode));
    const std::uint16_t base_sq = static_cast<std::uint16_t>(finite_base(largest_sq, kHighestCodeSq));
    move_and_encode(home, next, base, base_sq, to);
    *to.exp_avg_base = base;
    *to.exp_avg_sq_base = base_sq;
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

  struct MomentPair {
    AvxPair m, v;
  };

  // The next moments of the block. Returns largest_halves.
  ZERO_OPT_INLINE std::uint32_t decay(const StateArrays& home, MomentPair* next) const {
    const std::uint8_t* const codes = static_cast<const std::uint8_t*>(home.exp_avg);
    const std::uint8_t* const codes_sq = static_cast<const std::uint8_t*>(home.exp_avg_sq);
    const std::uint16_t base = *home.exp_avg_base, base_sq = *home.exp_avg_sq_base;
    AvxInts most = {}, most_sq = {};
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < kPairs; ++i) {
      const AvxPair g = kHalfGrad ? words_of(AvxHalves{}, halves_at(grad(), i)) : pair_at(grad(), i);
      const AvxPair m = decoded_pair(codes + i * kPairNumel, base);
      const AvxPair v = decoded_sq_pair(codes_sq + i * kPairNumel, base_sq);
      next[i] = {m, v};
      decay_vector(g.first, next[i].m.first, next[i].v.first, most, most_sq);
      decay_vector(g.second, next[i].m.second, next[i].v.second, most, most_sq);
    }
    return largest_halves(most, most_sq);
  }

  ZERO_OPT_INLINE void decay_vector(AvxWords g, AvxWords& m, AvxWords& v, AvxInts& most, AvxInts& most_sq) const {
    const Element<AvxFloats> old = {AvxFloats{}, (AvxFloats)m, (AvxFloats)v, AvxFloats{}};
    const Element<AvxFloats> next = UsualUpdate::decayed(adam, scalars.grad_factor * (AvxFloats)g, old);
    m = (AvxWords)next.exp_avg;
    v = (AvxWords)next.exp_avg_sq;
    const AvxInts magnitude = (AvxInts)(m & kMagnitude);
    const AvxInts magnitude_sq = (AvxInts)(v & kMagnitude);  // a NaN may have a sign
    most = magnitude > most ? magnitude : most;
    most_sq = magnitude_sq > most_sq ? magnitude_sq : most_sq;
  }

  ZERO_OPT_INLINE void move_and_encode(const StateArrays& home, const MomentPair* next, std::uint16_t base,
                                       std::uint16_t base_sq, const StateArrays& to) const {
    std::uint8_t* const codes = static_cast<std::uint8_t*>(to.exp_avg);
    std::uint8_t* const codes_sq = static_cast<std::uint8_t*>(to.exp_avg_sq);
    EncodedPair encoded[2];
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < kPairs; ++i) {
      const AvxPair p =
          kSplit ? joined(halves_at(home.param, i), halves_at(home.remainder, i)) : pair_at(home.param, i);
      const AvxPair &m = next[i].m, &v = next[i].v;
      write_master({moved(p.first, m.first, v.first), moved(p.second, m.second, v.second)}, i, to);
      encoded[i % 2] = encoded_pair(m, v, scalars.dither, base, base_sq);
      if (i % 2 != 0) {
        const EncodedPair &a = encoded[0], &b = encoded[1];
        const AvxWords signs = narrowed_signed(a.sign, b.sign) & 0x80808080u;
        const std::int64_t at = (i - 1) * kPairNumel;
        store(in_order(narrowed(a.code, b.code) | signs), codes + at);
        store(in_order(narrowed(a.code_sq, b.code_sq)), codes_sq + at);
      }
    }
  }

  ZERO_OPT_INLINE AvxWords moved(AvxWords p, AvxWords m, AvxWords v) const {
    const AvxFloats param = UsualUpdate::decayed_param(adam, (AvxFloats)p);
    const Element<AvxFloats> decayed = {param, (AvxFloats)m, (AvxFloats)v, (AvxFloats)v};
    const AvxFloats denominator = UsualUpdate::denominator<true>(adam, decayed);
    return (AvxWords)UsualUpdate::moved(adam, decayed, denominator);
  }

  ZERO_OPT_INLINE void write_master(const AvxPair& master, std::int64_t pair, const StateArrays& to) const {
    const std::int64_t at = pair * kPairNumel;
    if constexpr (kSplit) {
      const AvxPair bits = separable(master);
      const AvxHalves lower = lower_halves(bits);
      store(upper_halves(bits) + (lower >> 15), static_cast<std::uint16_t*>(to.param) + at);
      store(lower, to.remainder + at);
    } else {
      const AvxPair whole = unpaired(master);
      store(whole.first, static_cast<float*>(to.param) + at);
      store(whole.second, static_cast<float*>(to.param) + at + kAvxNumel);
      if (run.out == nullptr) return;
      const AvxHalves halves = bf16_of(master);
      streams ? stream((AvxWords)halves, out() + at) : store(halves, out() + at);
    }
  }

  template <bool kPast>
  ZERO_OPT_INLINE void copy(const LogBlock& log) const {
    const StateArrays to = home_arrays();
    copy_vectors<kPast, kSplit ? kPairs : 2 * kPairs>(log.param, to.param);
    if constexpr (kSplit) copy_vectors<kPast, kPairs>(log.remainder, to.remainder);
    copy_vectors<kPast, kPairs / 2>(log.exp_avg, to.exp_avg);
    copy_vectors<kPast, kPairs / 2>(log.exp_avg_sq, to.exp_avg_sq);
    *to.exp_avg_base = *log.exp_avg_base;
    *to.exp_avg_sq_base = *log.exp_avg_sq_base;
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
