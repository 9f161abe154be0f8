// Adagrad (Duchi et al. 2011, figure 1, diagonal), in the order of operations of torch's fused CPU kernel.
#pragma once

#include "kernels/update_element.inl"

namespace zero_opt {
namespace {

struct AdagradScalars {
  float lr;  // lr / (1 + (t - 1) * lr_decay)
  float eps;
  float l2;
  float has_l2;  // 1 or 0
};

struct AdagradUpdate {
  using Scalars = AdagradScalars;
  static constexpr int kArrays = 1;

  template <typename Value>
  static inline Element<Value> step(const Scalars& s, Value g, const Element<Value>& old) {
    Element<Value> stepped = {};
    const Value direction = s.has_l2 != 0.0f ? fma32(old.param, all<Value>(s.l2), g) : g;
    stepped.exp_avg = fma32(direction, direction, old.exp_avg);
    stepped.param = old.param - s.lr * direction / (root(stepped.exp_avg) + s.eps);
    return stepped;
  }
};

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  static constexpr const char* kHypers[] = {"lr", "lr_decay", "weight_decay", "eps"};
  static constexpr const char* kArrays[] = {"sum"};
  using Scalars = AdagradScalars;

  struct Hypers {
    double lr, lr_decay, weight_decay, eps;
  };

  static inline int arrays(const Hypers&) { return 1; }

  static inline Scalars scalars(const Hypers& h, double step) {
    Scalars s = {};
    s.lr = static_cast<float>(h.lr / (1.0 + (step - 1.0) * h.lr_decay));
    s.eps = static_cast<float>(h.eps);
    s.l2 = static_cast<float>(h.weight_decay);
    s.has_l2 = h.weight_decay != 0.0 ? 1.0f : 0.0f;
    return s;
  }

  template <typename Use>
  static inline auto with_update(const Scalars&, int, const Use& use) {
    return use(AdagradUpdate());
  }
};

}  // namespace
}  // namespace zero_opt
