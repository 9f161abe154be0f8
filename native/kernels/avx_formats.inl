// Elements in registers, a few vectors of them, to where they go: included once by each isa_*.cpp, like step_loop.inl.
#pragma once

#include "kernels/compact.inl"
#include "kernels/stream.inl"

#if defined(ZERO_OPT_HAS_AVX2)

namespace zero_opt {
namespace {

// Split masters, as in compact.inl.
inline AvxFloats joined_at(const std::uint16_t* params, const std::int16_t* remainders) {
  const AvxInts high = (AvxInts)(widened(params) << 16), remainder = (AvxInts)widened(remainders);
  const AvxInts written = (AvxInts)(high + high == 0) & (remainder >> 31);
  return (AvxFloats)(high + (remainder & ~written));
}

ZERO_OPT_INLINE void write_split(AvxFloats master, AvxFloats next, std::uint16_t* params, std::int16_t* remainders) {
  const AvxWords bits = separable<AvxWords>(master), next_bits = separable<AvxWords>(next);
  store(upper_halves(bits + kRoundParam, next_bits + kRoundParam), params);
  store(lower_halves(bits, next_bits), remainders);
}

ZERO_OPT_INLINE void write_bf16(AvxFloats values, AvxFloats next, std::uint16_t* to, bool streams) {
  const AvxWords halves = upper_halves(rounded_bf16<AvxWords>(values), rounded_bf16<AvxWords>(next));
  streams ? stream(halves, to) : store(halves, to);
}

// The same of pairs.
inline AvxPair joined(AvxHalves params, AvxHalves remainders) {
  const AvxHalves lowest = AvxHalves{} + (std::uint16_t)0x8000u;
  const AvxShorts least = (AvxShorts)raised_where(params + params, ~AvxHalves{}, AvxHalves{}, lowest);  // 0 beside 0
  const AvxShorts kept = (AvxShorts)remainders > least ? (AvxShorts)remainders : least;
  return words_of((AvxHalves)kept, params + (AvxHalves)(kept >> 15));
}

inline AvxPair separable(const AvxPair& masters) {
  return {separable<AvxWords>((AvxFloats)masters.first), separable<AvxWords>((AvxFloats)masters.second)};
}

inline AvxHalves bf16_of(const AvxPair& values) {
  const AvxWords first = rounded_bf16<AvxWords>((AvxFloats)values.first);
  return upper_halves({first, rounded_bf16<AvxWords>((AvxFloats)values.second)});
}

}  // namespace
}  // namespace zero_opt
#endif
