#include "bindings/arguments.hpp"

#include <cstddef>
#include <stdexcept>

#include "kernels/dispatch.hpp"

namespace zero_opt::bindings {

const Kernels& table(const std::string& isa) {
  return isa.empty() ? chosen_kernels() : kernels_named(isa);
}

Format format_named(const std::string& dtype) {
  if (dtype == "float32") return Format::kFloat32;
  if (dtype == "bfloat16") return Format::kBfloat16;
  if (dtype == "float16") return Format::kFloat16;
  if (dtype == "uint8") return Format::kBlock8;
  throw std::invalid_argument("no kernel for dtype '" + dtype + "'");
}

Format float_named(const std::string& dtype) {
  const Format format = format_named(dtype);
  if (format == Format::kBlock8) throw std::invalid_argument("no float dtype: '" + dtype + "'");
  return format;
}

Format mean_format(const std::string& dtype) { return dtype == "float64" ? Format::kFloat64 : float_named(dtype); }

namespace {

void check_arrays(const Hypers& hypers, const UpdateRun& run) {
  const StateArrays& arrays = run.from;
  const int needed = arrays_needed(hypers);
  if (run.numel > 0) {
    const void* const places[] = {arrays.exp_avg, arrays.exp_avg_sq};
    for (int i = 0; i < 2; ++i) {
      if ((places[i] != nullptr) != (i < needed)) {
        throw std::invalid_argument("the update takes " + std::to_string(needed) + " arrays of state");
      }
    }
  }
  if (needed < 2 && (arrays.max_exp_avg_sq != nullptr || run.moment_format != Format::kFloat32)) {
    throw std::invalid_argument("a maximum, or moments in another format than float32, of another update than Adam");
  }
}

}  // namespace

std::vector<UpdateBatch> with_grads(const std::vector<Batch>& batches) {
  std::vector<UpdateBatch> work;
  for (const auto& [hypers, runs, grads] : batches) {
    if (runs.size() != grads.size()) throw std::invalid_argument("every run needs the address of its gradient");
    work.push_back({hypers, runs});
    for (std::size_t i = 0; i < grads.size(); ++i) {
      UpdateRun& run = work.back().runs[i].run;
      run.grad = memory(grads[i]);
      check_arrays(hypers, run);
      if (run.grad == nullptr && run.numel > 0) throw std::invalid_argument("a gradient without an address");
    }
  }
  return work;
}

std::vector<GradArray> make_grads(const std::vector<Grad>& grads, const std::vector<std::uintptr_t>& squares) {
  if (!squares.empty() && squares.size() != grads.size()) {
    throw std::invalid_argument("either all gradients or none have a place for sums");
  }
  std::vector<GradArray> arrays;
  for (const auto& [address, dtype, numel] : grads) {
    if (numel < 0) throw std::invalid_argument("numel must not be negative, got " + std::to_string(numel));
    const std::uintptr_t sums = squares.empty() ? 0 : squares[arrays.size()];
    arrays.push_back({memory(address), float_named(dtype), numel, static_cast<double*>(memory(sums))});
  }
  return arrays;
}

}  // namespace zero_opt::bindings
