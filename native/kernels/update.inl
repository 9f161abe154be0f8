// What a step does to one element, whatever its arrays' formats are and whoever reads and writes them: the one template
// argument that a loop has for it. Included once by each isa_*.cpp, by adam.inl.
//
// An update is a class with ``step`` and with a constant for each array of state that not all of them have. Another
// optimizer is another such class, and a line in with_update.
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

// a / divisor, rounded once, given reciprocal = 1 / divisor rounded once. The divisor must be in [2^-64, 1] and a
// no smaller than 2^-75 unless it is zero: then nothing here is subnormal. kFinite: who calls discards what comes of an
// infinite a.
template <bool kFinite, typename Value>
inline Value divide(Value a, Value divisor, Value reciprocal) {
#if defined(ZERO_OPT_HAS_FMA)
  // Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000 processor", theorem 8.3: the
  // remainder of the approximate quotient is exact, and correcting by it rounds correctly. An infinite a has no
  // remainder. Three multiplications leave the divider to the one division and the root that cannot do without.
  const Value quotient = a * reciprocal;
  const Value remainder = fma32(-quotient, divisor, a);
  const Value corrected = fma32(remainder, reciprocal, quotient);
  if constexpr (kFinite) return corrected;
  return remainder == remainder ? corrected : quotient;
#else
  (void)reciprocal;
  return a / divisor;
#endif
}

// The state of one element.
template <typename Value>
struct Element {
  Value param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// One Adam step (Kingma and Ba 2015, algorithm 1) with decoupled decay (Loshchilov and Hutter 2019,
// algorithm 2, line 12), L2 decay, and the maximum of Reddi et al. 2018 (algorithm 2), in the order of
// operations of torch's fused CPU kernel.
//
// kTurned: torch's lerp starts from the end that is nearer to the result, which for beta1 <= 0.5 is the
// gradient. The choices are template parameters so that no loop carries a test.
template <bool kL2, bool kAmsgrad, bool kTurned>
struct AdamUpdate {
  static constexpr bool kMaximum = kAmsgrad;  // whether max_exp_avg_sq is read and written

  // kFinite: see divide.
  template <bool kFinite = false, typename Value>
  static inline Element<Value> step(const AdamScalars& s, Value g, const Element<Value>& old) {
    Element<Value> stepped = decayed(s, g, old);
    stepped.param = moved(s, stepped, denominator<kFinite>(s, stepped));
    return stepped;
  }

  // The parts of a step, for a loop that does something else between them. The new state, with a param that has not been
  // moved; with no maximum, max_exp_avg_sq is exp_avg_sq.
  template <typename Value>
  static inline Element<Value> decayed(const AdamScalars& s, Value g, const Element<Value>& old) {
    if constexpr (kL2) g = fma32(old.param, all<Value>(s.l2), g);
    const Value p = old.param * s.decay;
    const Value turn = g - old.exp_avg;
    const Value m = kTurned ? fma32(all<Value>(s.weight1 - 1.0f), turn, g)
                            : fma32(all<Value>(s.weight1), turn, old.exp_avg);
    const Value v = fma32(s.weight2 * g, g, old.exp_avg_sq * s.beta2);
    Value root_of = v;
    // As torch's maximum: NaN on either side stays NaN.
    if constexpr (kAmsgrad) root_of = ((v > old.max_exp_avg_sq) | (v != v)) ? v : old.max_exp_avg_sq;
    return {p, m, v, root_of};
  }

  template <bool kFinite, typename Value>
  static inline Value denominator(const AdamScalars& s, const Element<Value>& decayed) {
    const Value rooted = root(decayed.max_exp_avg_sq);
    return divide<kFinite>(rooted, all<Value>(s.bias_correction2_sqrt), all<Value>(s.reciprocal)) + s.eps;
  }

  template <typename Value>
  static inline Value moved(const AdamScalars& s, const Element<Value>& decayed, Value denominator) {
    return decayed.param - s.step_size * decayed.exp_avg / denominator;
  }
};

// The update without options, for which bf16 gradients, split masters and 8-bit moments have loops of their own.
using UsualUpdate = AdamUpdate<false, false, false>;

inline bool starts_from_moment(const AdamScalars& s) { return s.weight1 < 0.5f; }

inline bool is_usual(const AdamScalars& s, bool maximum) { return !s.has_l2 && !maximum && starts_from_moment(s); }

// Calls ``use`` with the step's update, whose lerps are turned or not.
template <bool kTurned, typename Use>
inline auto with_update_of(const AdamScalars& s, bool maximum, const Use& use) {
  if (s.has_l2) {
    return maximum ? use(AdamUpdate<true, true, kTurned>()) : use(AdamUpdate<true, false, kTurned>());
  }
  return maximum ? use(AdamUpdate<false, true, kTurned>()) : use(AdamUpdate<false, false, kTurned>());
}

// Calls ``use`` with the step's update.
template <typename Use>
inline auto with_update(const AdamScalars& s, bool maximum, const Use& use) {
  return starts_from_moment(s) ? with_update_of<false>(s, maximum, use) : with_update_of<true>(s, maximum, use);
}

}  // namespace
}  // namespace zero_opt
