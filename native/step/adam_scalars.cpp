#include "step/adam_scalars.hpp"

#include <cmath>

namespace zero_opt {

std::uint32_t dither_of(double step) {
  // One round of splitmix64 (Steele, Lea and Flood 2014).
  std::uint64_t mixed = static_cast<std::uint64_t>(step) * 0x9e3779b97f4a7c15ull;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>(mixed >> 32);
}

namespace {

void correct_bias(const AdamHypers& hypers, double step, float& step_size, float& root_of_correction2,
                  float& reciprocal) {
  step_size = static_cast<float>(hypers.lr / (1.0 - std::pow(hypers.beta1, step)));
  root_of_correction2 = static_cast<float>(std::sqrt(1.0 - std::pow(hypers.beta2, step)));
  reciprocal = 1.0f / root_of_correction2;
}

}  // namespace

AdamScalars adam_scalars(const AdamHypers& hypers, double step) {
  AdamScalars scalars;
  correct_bias(hypers, step, scalars.step_size, scalars.bias_correction2_sqrt, scalars.reciprocal);
  correct_bias(hypers, step + 1.0, scalars.next_step_size, scalars.next_bias_correction2_sqrt, scalars.next_reciprocal);
  scalars.decay = hypers.decoupled ? static_cast<float>(1.0 - hypers.lr * hypers.weight_decay) : 1.0f;
  scalars.has_l2 = !hypers.decoupled && hypers.weight_decay != 0.0;
  scalars.l2 = static_cast<float>(hypers.weight_decay);
  scalars.weight1 = static_cast<float>(1.0 - hypers.beta1);
  scalars.weight2 = static_cast<float>(1.0 - hypers.beta2);
  scalars.beta2 = static_cast<float>(hypers.beta2);
  scalars.eps = static_cast<float>(hypers.eps);
  scalars.grad_factor = static_cast<float>(hypers.maximize ? -hypers.grad_scale : hypers.grad_scale);
  scalars.prediction = static_cast<float>(hypers.prediction);
  scalars.dither = dither_of(step);
  return scalars;
}

}  // namespace zero_opt
