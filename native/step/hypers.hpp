// Hyperparameters as the user wrote them, and the scalars of one step.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"

namespace zero_opt {

constexpr int kMostHypers = 8;

// The hyperparameters of one group at one step.
struct Hypers {
  std::int32_t kind;           // of update, by its place in the table
  double values[kMostHypers];  // of that update, in its own order
  double grad_scale;           // what gradients are multiplied by first
  bool maximize;               // gradients are negated
  double prediction;           // see StepScalars
};

// Those of the update of that name. Throws std::invalid_argument for another name, or other hyperparameters than it has.
Hypers make_hypers(const std::string& name, const std::map<std::string, double>& values);

// How many arrays of state a step needs, at the least.
int arrays_needed(const Hypers& hypers);

// What each array of state is called, in all updates that have so many: the first, the second, the third.
std::vector<std::string> names_of_array(int number);

// The scalars of step t, counted from 1.
StepScalars scalars_of(const Hypers& hypers, double step);

// A number that is another one for every step.
std::uint32_t dither_of(double step);

}  // namespace zero_opt
