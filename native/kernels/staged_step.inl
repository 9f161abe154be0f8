// The whole step in one read and one write of memory: included once by each isa_*.cpp, after step_loop.inl.
//
// The maths exists for fp32 arrays, and bf16 moments, only. Arrays in another format pass, kStaged elements at a time,
// through copies small enough to stay in the nearest cache, and long enough that it does not matter what a loop costs to
// begin and end, so that memory sees each byte once and the number of loops is the sum of the formats and not their
// product.
#pragma once

#include "kernels/step_loop.inl"
#include "kernels/compact.inl"
#include "kernels/convert.inl"
#include "kernels/float_formats.inl"
#include "kernels/stream.inl"

namespace zero_opt {
namespace {

static_assert(kStaged % kCutNumel == 0, "the blocks of 8-bit moments must not be cut");

struct alignas(64) Staging {
  float param[kStaged];
  float grad[kStaged];
  float out[kStaged];
  float predicted[kStaged];
  float exp_avg[kStaged];
  float exp_avg_sq[kStaged];
};

void write_out(const UpdateRun& run, std::int64_t start, std::int64_t n, const float* values, Staging& staging) {
  const std::int64_t width = bytes_of(run.out_format);
  char* to = static_cast<char*>(run.out) + start * width;
  const bool whole_lines = reinterpret_cast<std::uintptr_t>(to) % kLine == 0 && n * width % kLine == 0;
  if (run.numel < kStreamNumel || !whole_lines) {
    write_floats(run.out, run.out_format, start, n, values);
    return;
  }
  write_floats(staging.out, run.out_format, 0, n, values);
  write_lines(staging.out, n * width, to, true);
}

// Points at the moments of a format that the loop knows, from element start on.
void point_at_moments(const StateArrays& arrays, Format format, std::int64_t start, LaneArrays& lanes) {
  if (format == Format::kFloat32) {
    if (arrays.exp_avg != nullptr) lanes.exp_avg = static_cast<float*>(arrays.exp_avg) + start;
    if (arrays.exp_avg_sq != nullptr) lanes.exp_avg_sq = static_cast<float*>(arrays.exp_avg_sq) + start;
  } else {
    lanes.half_exp_avg = static_cast<std::uint16_t*>(arrays.exp_avg) + start;
    lanes.half_exp_avg_sq = static_cast<std::uint16_t*>(arrays.exp_avg_sq) + start;
  }
}

// Shows the loop the moments from element start on, a multiple of kCutNumel.
void read_moments(const UpdateRun& run, std::int64_t start, Staging& staging, Lanes& lanes) {
  if (run.moment_format != Format::kBlock8) {
    point_at_moments(run.from, run.moment_format, start, lanes.from);
    point_at_moments(run.to, run.moment_format, start, lanes.to);
    return;
  }
  lanes.from.exp_avg = lanes.to.exp_avg = staging.exp_avg;
  lanes.from.exp_avg_sq = lanes.to.exp_avg_sq = staging.exp_avg_sq;
  decode_blocks(blocks_of(run, run.from, 0), start, lanes.numel, staging.exp_avg, staging.exp_avg_sq);
}

void write_moments(const UpdateRun& run, std::int64_t start, std::uint32_t dither, const Lanes& lanes) {
  if (run.moment_format != Format::kBlock8) return;
  encode_blocks(blocks_of(run, run.to, dither), start, lanes.numel, lanes.to.exp_avg, lanes.to.exp_avg_sq);
}

// Points at a master as it lies, from element start on.
void point_at_param(const StateArrays& arrays, std::int64_t start, LaneArrays& lanes) {
  if (arrays.remainder == nullptr) {
    lanes.param = static_cast<float*>(arrays.param) + start;
  } else {
    lanes.half_param = static_cast<std::uint16_t*>(arrays.param) + start;
    lanes.remainder = arrays.remainder + start;
  }
  if (arrays.max_exp_avg_sq != nullptr) lanes.max_exp_avg_sq = arrays.max_exp_avg_sq + start;
}

// New params, and so many times the updates that would make ``predicted`` from them.
void scale_updates(float factor, std::int64_t n, const float* __restrict__ param, float* __restrict__ predicted) {
  for (std::int64_t i = 0; i < n; ++i) predicted[i] = param[i] + factor * (predicted[i] - param[i]);  // vectorise
}

// Predicts params once they are stepped, into the staging: steps them once more with the same gradient, from moments as
// they are kept. The new moments go where nobody reads them.
void predict(const StepScalars& scalars, const UpdateRun& run, std::int64_t start, const Lanes& stepped,
             Staging& staging) {
  StepScalars next = scalars;
  next.now = scalars.next;
  Lanes lanes = stepped;
  lanes.from = stepped.to;
  if (run.moment_format == Format::kBlock8) {
    decode_blocks(blocks_of(run, run.to, 0), start, lanes.numel, staging.exp_avg, staging.exp_avg_sq);
  }
  lanes.to.param = staging.predicted;
  if (lanes.to.half_exp_avg != nullptr) {
    lanes.to.half_exp_avg = reinterpret_cast<std::uint16_t*>(staging.exp_avg);
    lanes.to.half_exp_avg_sq = reinterpret_cast<std::uint16_t*>(staging.exp_avg_sq);
  } else {
    if (lanes.to.exp_avg != nullptr) lanes.to.exp_avg = staging.exp_avg;
    if (lanes.to.exp_avg_sq != nullptr) lanes.to.exp_avg_sq = staging.exp_avg_sq;
  }
  if (lanes.to.max_exp_avg_sq != nullptr) lanes.to.max_exp_avg_sq = staging.out;
  pick_loop(next, lanes);
  scale_updates(scalars.prediction, lanes.numel, stepped.to.param, staging.predicted);
}

// After the factor.
std::int32_t count_nonfinite(float factor, const Lanes& lanes) {
  std::int32_t count = 0;
  for (std::int64_t i = 0; i < lanes.numel; ++i) {
    count += is_nonfinite(factor * (lanes.half_grad != nullptr ? bf16_to_float(lanes.half_grad[i]) : lanes.grad[i]));
  }
  return count;
}

// Elements of any run, through the staging: see the top.
std::int32_t update_by_staging(const StepScalars& scalars, const UpdateRun& run, std::int64_t start, std::int64_t n,
                             Staging& staging) {
  Lanes lanes = {};
  lanes.numel = n;
  const bool converting = is_usual(scalars, run.from.max_exp_avg_sq != nullptr);
  if (converting && run.grad_format == Format::kBfloat16) {
    lanes.half_grad = static_cast<const std::uint16_t*>(run.grad) + start;
  } else {
    lanes.grad = read_floats(run.grad, run.grad_format, start, n, staging.grad);
  }
  point_at_param(run.from, start, lanes.from);
  point_at_param(run.to, start, lanes.to);
  const bool staged = run.from.remainder != nullptr && !(converting && run.out == nullptr);
  const LaneArrays to = lanes.to;
  if (staged) {
    join_master(lanes.from.half_param, lanes.from.remainder, n, staging.param);
    lanes.from.param = lanes.to.param = staging.param;
    lanes.from.half_param = lanes.to.half_param = nullptr;
  }
  read_moments(run, start, staging, lanes);
  const bool spoilt = pick_loop(scalars, lanes);
  write_moments(run, start, scalars.dither, lanes);
  if (staged) split_master(staging.param, n, to.half_param, to.remainder);
  if (predicts(scalars, run)) {
    predict(scalars, run, start, lanes, staging);
    write_out(run, start, n, staging.predicted, staging);
  } else if (staged && run.out_format == Format::kBfloat16) {  // as split: write_out() rounds ties in another way
    std::uint16_t* out = static_cast<std::uint16_t*>(run.out) + start;
    for (std::int64_t i = 0; i < n; ++i) out[i] = to.half_param[i];
  } else if (run.out != nullptr) {
    write_out(run, start, n, lanes.to.param, staging);
  }
  return spoilt ? count_nonfinite(scalars.grad_factor, lanes) : 0;
}

// n elements from start, a multiple of kCutNumel.
std::int64_t update_staged(const StepScalars& scalars, const UpdateRun& run, std::int64_t start, std::int64_t n,
                         Staging& staging) {
  std::int64_t nonfinite = 0;
  for (const std::int64_t end = start + n; start < end;) {
    const std::int64_t next = end - start < kStaged ? end - start : kStaged;
    nonfinite += update_by_staging(scalars, run, start, next, staging);
    start += next;
  }
  return nonfinite;
}

}  // namespace
}  // namespace zero_opt
