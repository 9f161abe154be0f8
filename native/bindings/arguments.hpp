// What Python passes, as what the kernels take: addresses, names of dtypes, batches of runs.
//
// Each throws std::invalid_argument, which pybind11 raises as ValueError, for what no kernel takes.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/kernels.hpp"
#include "step/step.hpp"

namespace zero_opt::bindings {

inline void* memory(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// The kernels of that name, or, without one, those chosen for this processor.
const Kernels& table(const std::string& isa);

// By torch's name of the dtype; uint8 stands for the 8-bit format of moments.
Format format_named(const std::string& dtype);

// Of those, a format of floats that a step takes.
Format float_named(const std::string& dtype);

// A format of floats that a mean takes: float64, too.
Format mean_format(const std::string& dtype);

// Hyperparameters, their runs, and the address of each run's gradient.
using Batch = std::tuple<Hypers, std::vector<CountedRun>, std::vector<std::uintptr_t>>;

// Throws if a run has other arrays than the update takes.
std::vector<UpdateBatch> with_grads(const std::vector<Batch>& batches);

// Address, dtype and number of elements.
using Grad = std::tuple<std::uintptr_t, std::string, std::int64_t>;

// ``squares`` are addresses, one per array, or none at all.
std::vector<GradArray> make_grads(const std::vector<Grad>& grads, const std::vector<std::uintptr_t>& squares);

}  // namespace zero_opt::bindings
