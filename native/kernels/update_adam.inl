// Adam and AdamW.
#pragma once

#include "kernels/update_element.inl"

namespace zero_opt {
namespace {

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

struct AdamScalars {
  float step_size;              // lr / (1 - beta1^t)
  float bias_correction2_sqrt;  // sqrt(1 - beta2^t)
  float reciprocal;             // 1 / that
  float decay;                  // 1 - lr * weight_decay; 1 when the decay is not decoupled
  float has_l2;                 // 1 if weight_decay is added to the gradient, else 0
  float l2;                     // of which this is the factor; it may have underflowed to 0
  float weight1;                // 1 - beta1
  float weight2;                // 1 - beta2
  float beta2;
  float eps;
};

// One Adam step (Kingma and Ba 2015, algorithm 1) with decoupled decay (Loshchilov and Hutter 2019,
// algorithm 2, line 12), L2 decay, and the maximum of Reddi et al. 2018 (algorithm 2), in the order of
// operations of torch's fused CPU kernel.
//
// kTurned: torch's lerp starts from the end that is nearer to the result, which for beta1 <= 0.5 is the
// gradient. The choices are template parameters so that no loop carries a test.
template <bool kL2, bool kAmsgrad, bool kTurned>
struct AdamUpdate {
  using Scalars = AdamScalars;
  static constexpr int kArrays = kAmsgrad ? 3 : 2;

  // kFinite: see divide.
  template <bool kFinite = false, typename Value>
  static inline Element<Value> step(const Scalars& s, Value g, const Element<Value>& old) {
    Element<Value> stepped = decayed(s, g, old);
    stepped.param = moved(s, stepped, denominator<kFinite>(s, stepped));
    return stepped;
  }

  // The parts of a step, for a loop that does something else between them. The new state, with a param that has not been
  // moved; with no maximum, max_exp_avg_sq is exp_avg_sq.
  template <typename Value>
  static inline Element<Value> decayed(const Scalars& s, Value g, const Element<Value>& old) {
    if constexpr (kL2) g = fma32(old.param, all<Value>(s.l2), g);
    const Value p = decayed_param(s, old.param);
    const Value turn = g - old.exp_avg;
    const Value m = kTurned ? fma32(all<Value>(s.weight1 - 1.0f), turn, g)
                            : fma32(all<Value>(s.weight1), turn, old.exp_avg);
    const Value v = fma32(s.weight2 * g, g, old.exp_avg_sq * s.beta2);
    Value root_of = v;
    // As torch's maximum: NaN on either side stays NaN.
    if constexpr (kAmsgrad) root_of = ((v > old.max_exp_avg_sq) | (v != v)) ? v : old.max_exp_avg_sq;
    return {p, m, v, root_of};
  }

  template <typename Value>
  static inline Value decayed_param(const Scalars& s, Value param) {
    return param * s.decay;
  }

  template <bool kFinite, typename Value>
  static inline Value denominator(const Scalars& s, const Element<Value>& decayed) {
    const Value rooted = root(decayed.max_exp_avg_sq);
    return divide<kFinite>(rooted, all<Value>(s.bias_correction2_sqrt), all<Value>(s.reciprocal)) + s.eps;
  }

  template <typename Value>
  static inline Value moved(const Scalars& s, const Element<Value>& decayed, Value denominator) {
    return decayed.param - s.step_size * decayed.exp_avg / denominator;
  }
};

// The update without options, for which bf16 gradients, split masters and 8-bit moments have loops of their own.
using UsualUpdate = AdamUpdate<false, false, false>;

inline bool starts_from_moment(const AdamScalars& s) { return s.weight1 < 0.5f; }

// Calls ``use`` with the step's update, whose lerps are turned or not.
template <bool kTurned, typename Use>
inline auto with_adam_of(const AdamScalars& s, bool maximum, const Use& use) {
  if (s.has_l2 != 0.0f) {
    return maximum ? use(AdamUpdate<true, true, kTurned>()) : use(AdamUpdate<true, false, kTurned>());
  }
  return maximum ? use(AdamUpdate<false, true, kTurned>()) : use(AdamUpdate<false, false, kTurned>());
}

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr const char* kHypers[] = {"lr", "beta1", "beta2", "eps", "weight_decay", "decoupled"};
  static constexpr const char* kArrays[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  using Scalars = AdamScalars;

  struct Hypers {
    double lr, beta1, beta2, eps, weight_decay, decoupled;
  };

  // But for the maximum, which is there or not.
  static inline int arrays(const Hypers&) { return 2; }

  static inline Scalars scalars(const Hypers& h, double step) {
    const bool decoupled = h.decoupled != 0.0;
    Scalars s = {};
    s.step_size = static_cast<float>(h.lr / (1.0 - __builtin_pow(h.beta1, step)));
    s.bias_correction2_sqrt = static_cast<float>(__builtin_sqrt(1.0 - __builtin_pow(h.beta2, step)));
    s.reciprocal = 1.0f / s.bias_correction2_sqrt;
    s.decay = decoupled ? static_cast<float>(1.0 - h.lr * h.weight_decay) : 1.0f;
    s.has_l2 = !decoupled && h.weight_decay != 0.0 ? 1.0f : 0.0f;
    s.l2 = static_cast<float>(h.weight_decay);
    s.weight1 = static_cast<float>(1.0 - h.beta1);
    s.weight2 = static_cast<float>(1.0 - h.beta2);
    s.beta2 = static_cast<float>(h.beta2);
    s.eps = static_cast<float>(h.eps);
    return s;
  }

  template <typename Use>
  static inline auto with_update(const Scalars& s, int arrays, const Use& use) {
    return starts_from_moment(s) ? with_adam_of<false>(s, arrays > 2, use) : with_adam_of<true>(s, arrays > 2, use);
  }
};

}  // namespace
}  // namespace zero_opt
