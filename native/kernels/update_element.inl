// What an update is made of: operations on a float, or on a vector of floats, each an IEEE operation rounded once.
// Included once by each isa_*.cpp, by the updates.
#pragma once

#include "kernels/fma.inl"
#include "kernels/kernels.hpp"

namespace zero_opt {
namespace {

// Value is a float, or a vector of floats: then what is said of an element is of as many.
template <typename Value>
inline Value all(float value) {
  return value - Value{};
}

inline float root(float value) { return __builtin_sqrtf(value); }

// One element's param and state. An update whose state has other names has it in these places, in order.
template <typename Value>
struct Element {
  Value param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

}  // namespace
}  // namespace zero_opt
