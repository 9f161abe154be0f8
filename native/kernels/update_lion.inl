// Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2), one rounding per operation.
#pragma once

#include "kernels/update_element.inl"

namespace zero_opt {
namespace {

struct LionScalars {
  float lr;
  float decay;  // 1 - lr * weight_decay
  float beta1, weight1;  // weight1 = 1 - beta1
  float beta2, weight2;
};

struct LionUpdate {
  using Scalars = LionScalars;
  static constexpr int kArrays = 1;

  template <typename Value>
  static inline Element<Value> step(const Scalars& s, Value g, const Element<Value>& old) {
    Element<Value> stepped = {};
    const Value zero = {}, one = all<Value>(1.0f);
    const Value direction = old.exp_avg * s.beta1 + g * s.weight1;
    // 0 of NaN, as torch.sign.
    const Value sign = (direction > zero ? one : zero) - (direction < zero ? one : zero);
    stepped.param = old.param * s.decay - s.lr * sign;
    stepped.exp_avg = old.exp_avg * s.beta2 + g * s.weight2;
    return stepped;
  }
};

struct Lion {
  static constexpr const char* kName = "lion";
  static constexpr const char* kHypers[] = {"lr", "beta1", "beta2", "weight_decay"};
  static constexpr const char* kArrays[] = {"exp_avg"};
  using Scalars = LionScalars;

  struct Hypers {
    double lr, beta1, beta2, weight_decay;
  };

  static inline int arrays(const Hypers&) { return 1; }

  static inline Scalars scalars(const Hypers& h, double) {
    Scalars s = {};
    s.lr = static_cast<float>(h.lr);
    s.decay = static_cast<float>(1.0 - h.lr * h.weight_decay);
    s.beta1 = static_cast<float>(h.beta1);
    s.weight1 = static_cast<float>(1.0 - h.beta1);
    s.beta2 = static_cast<float>(h.beta2);
    s.weight2 = static_cast<float>(1.0 - h.beta2);
    return s;
  }

  template <typename Use>
  static inline auto with_update(const Scalars&, int, const Use& use) {
    return use(LionUpdate());
  }
};

}  // namespace
}  // namespace zero_opt
