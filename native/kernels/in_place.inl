// A step where the state is: included once by each isa_*.cpp.
#pragma once

#include "kernels/block_in_registers.inl"
#include "kernels/staged_step.inl"

namespace zero_opt {
namespace {

inline bool in_place(const UpdateRun& run) {
  const StateArrays &from = run.from, &to = run.to;
  return from.param == to.param && from.remainder == to.remainder && from.exp_avg == to.exp_avg &&
         from.exp_avg_sq == to.exp_avg_sq && from.max_exp_avg_sq == to.max_exp_avg_sq;
}

// Whether the loop of step_loop.inl takes the arrays as they are, however many elements.
inline bool as_it_lies(const UpdateRun& run) {
  return run.grad_format == Format::kFloat32 && run.moment_format == Format::kFloat32 &&
         run.from.remainder == nullptr && run.out == nullptr;
}

// Longer loops convert that faster.
inline bool takes_fp16(const UpdateRun& run) {
  return run.grad_format == Format::kFloat16 || (run.out != nullptr && run.out_format == Format::kFloat16);
}

std::int64_t update(const StepScalars& scalars, const UpdateRun& run, std::int64_t begin, std::int64_t end) {
  Staging staging;
  if (as_it_lies(run)) return update_by_staging(scalars, run, begin, end - begin, staging);
  std::int64_t nonfinite = 0;
  if (in_place(run) && !takes_fp16(run) && steps_in_registers(run, scalars)) {
    const std::int64_t whole = (end - begin) / kLogNumel * kLogNumel;
    with_block_in_registers(scalars, run, begin, [&](auto at) {
      for (std::int64_t done = 0; done < whole; done += kLogNumel, at.next()) {
        nonfinite += at.step();
      }
    });
    begin += whole;
  }
  nonfinite += update_staged(scalars, run, begin, end - begin, staging);
  if (run.out != nullptr) end_streams();
  return nonfinite;
}

}  // namespace
}  // namespace zero_opt
