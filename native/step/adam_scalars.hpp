// The scalars of one step, from hyperparameters and the step's number.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace zero_opt {

// The hyperparameters of one group at one step, as the user wrote them.
struct AdamHypers {
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale;  // what gradients are multiplied by first
  bool decoupled, maximize;
  double prediction = 0.0;  // see AdamScalars
};

// The scalars of step t, counted from 1.
AdamScalars adam_scalars(const AdamHypers& hypers, double step);

// A number that is another one for every step.
std::uint32_t dither_of(double step);

}  // namespace zero_opt
