// Elements in registers, a few vectors of them, to where they go: included once by each isa_*.cpp, like adam.inl.
#pragma once

#include "kernels/compact.inl"
#include "kernels/stream.inl"

#if defined(ZERO_OPT_HAS_WIDE)

namespace zero_opt {
namespace {

// Split masters, as in compact.inl.
inline WideFloats joined_at(const std::uint16_t* params, const std::int16_t* remainders) {
  return (WideFloats)((widened(params) << 16) + widened(remainders));
}

ZERO_OPT_INLINE void write_split(WideFloats master, WideFloats next, std::uint16_t* params, std::int16_t* remainders) {
  const WideWords bits = separable<WideWords>(master), next_bits = separable<WideWords>(next);
  store(upper_halves(bits + kRoundParam, next_bits + kRoundParam), params);
  store(lower_halves(bits, next_bits), remainders);
}

ZERO_OPT_INLINE void write_bf16(WideFloats values, WideFloats next, std::uint16_t* to, bool streams) {
  const WideWords halves = upper_halves(rounded_bf16<WideWords>(values), rounded_bf16<WideWords>(next));
  streams ? stream(halves, to) : store(halves, to);
}

}  // namespace
}  // namespace zero_opt
#endif
