// Stochastic gradient descent with momentum (Sutskever et al. 2013 for Nesterov's), in the order of operations of torch's
// fused CPU kernel.
#pragma once

#include "kernels/update_element.inl"

namespace zero_opt {
namespace {

struct SGDScalars {
  float lr;  // negative
  float momentum;
  float weight;  // 1 - dampening
  float l2;
  float has_l2, first, nesterov;  // 1 or 0; first: there is no momentum yet, whatever its array holds
};

template <bool kMomentum>
struct SGDUpdate {
  using Scalars = SGDScalars;
  static constexpr int kArrays = kMomentum ? 1 : 0;

  template <typename Value>
  static inline Element<Value> step(const Scalars& s, Value g, const Element<Value>& old) {
    Element<Value> stepped = {};
    Value direction = s.has_l2 != 0.0f ? fma32(old.param, all<Value>(s.l2), g) : g;
    if constexpr (kMomentum) {
      const Value kept = fma32(direction, all<Value>(s.weight), old.exp_avg * s.momentum);
      stepped.exp_avg = s.first != 0.0f ? direction : kept;
      const Value ahead = fma32(stepped.exp_avg, all<Value>(s.momentum), direction);
      direction = s.nesterov != 0.0f ? ahead : stepped.exp_avg;
    }
    stepped.param = fma32(direction, all<Value>(s.lr), old.param);
    return stepped;
  }
};

struct SGD {
  static constexpr const char* kName = "sgd";
  static constexpr const char* kHypers[] = {"lr", "momentum", "dampening", "weight_decay", "nesterov"};
  static constexpr const char* kArrays[] = {"momentum_buffer"};
  using Scalars = SGDScalars;

  struct Hypers {
    double lr, momentum, dampening, weight_decay, nesterov;
  };

  static inline int arrays(const Hypers& h) { return h.momentum != 0.0 ? 1 : 0; }

  // Step 1 is the one that makes the momentum.
  static inline Scalars scalars(const Hypers& h, double step) {
    Scalars s = {};
    s.lr = static_cast<float>(-h.lr);
    s.momentum = static_cast<float>(h.momentum);
    s.weight = static_cast<float>(1.0 - h.dampening);
    s.l2 = static_cast<float>(h.weight_decay);
    s.has_l2 = h.weight_decay != 0.0 ? 1.0f : 0.0f;
    s.first = step == 1.0 ? 1.0f : 0.0f;
    s.nesterov = h.nesterov != 0.0 ? 1.0f : 0.0f;
    return s;
  }

  // A momentum that underflows to 0 in fp32 is kept all the same.
  template <typename Use>
  static inline auto with_update(const Scalars& s, int arrays, const Use& use) {
    (void)s;
    return arrays != 0 ? use(SGDUpdate<true>()) : use(SGDUpdate<false>());
  }
};

}  // namespace
}  // namespace zero_opt
