// The usual runs, stepped into a log a whole block at a time: included once by each isa_*.cpp, by redo_log.inl.
#pragma once

#include "one_pass.inl"
#include "redo_log.hpp"

namespace zero_opt {
namespace {

// Whether a run's whole blocks can be stepped by Straight: fp32 state, lerps that start from the moment, and parameters
// of the gradient's 16-bit format, if that is one.
inline bool goes_straight(const AdamRun& run, const AdamScalars& scalars) {
  return run.moment_format == Format::kFloat32 && run.from.remainder == nullptr && scalars.weight1 < 0.5f &&
         (run.out == nullptr || run.out_format == run.grad_format ||
          (run.grad_format == Format::kFloat32 && run.out_format != Format::kFloat32));
}

// Steps a run of one kind, a whole block at a time. The length is a constant, from which the compiler makes straight
// code that decides nothing: for so few elements that would take as long as the step.
template <Format kGrad, bool kL2, bool kAmsgrad>
struct Straight {
  AdamScalars scalars;
  Lanes lanes;
  const std::uint16_t* halves;  // gradients in fp16
  char* out;
  bool streams, to_bf16;

  Straight(const AdamScalars& given, const AdamRun& run, std::int64_t begin) : scalars(given), lanes{}, halves(nullptr) {
    lanes.numel = kLogNumel;
    point_at_param(run.from, begin, lanes.from);
    point_at_moments(run.from, Format::kFloat32, begin, lanes.from);
    const std::uint16_t* narrow = static_cast<const std::uint16_t*>(run.grad) + begin;
    if (kGrad == Format::kFloat32) lanes.grad = static_cast<const float*>(run.grad) + begin;
    if (kGrad == Format::kBfloat16) lanes.half_grad = narrow;
    if (kGrad == Format::kFloat16) halves = narrow;
    out = run.out == nullptr ? nullptr : static_cast<char*>(run.out) + begin * 2;
    streams = run.numel >= kStreamNumel && reinterpret_cast<std::uintptr_t>(out) % kLine == 0;
    to_bf16 = run.out_format == Format::kBfloat16;
  }

  // A block into the log. Returns how many of its gradients are not finite.
  ZERO_OPT_INLINE std::int64_t step(LogBlock& log) {
    alignas(kLine) float widened[kLogNumel];
    Lanes block = lanes;
    block.to.param = log.param;
    block.to.exp_avg = log.exp_avg;
    block.to.exp_avg_sq = log.exp_avg_sq;
    if (kAmsgrad) block.to.max_exp_avg_sq = log.max_exp_avg_sq;
    if (kGrad == Format::kFloat16) {
      widen_fp16(halves, kLogNumel, widened);
      block.grad = widened;
    }
    const bool spoilt = adam_loop<kGrad == Format::kBfloat16, false, false, kL2, kAmsgrad, false>(scalars, block);
    if (out != nullptr) write(log.param);
    if (__builtin_expect(!spoilt, 1)) return 0;
    const Lanes seen = block;  // a copy, so that the others stay in registers
    return count_nonfinite(scalars.grad_factor, seen);
  }

  ZERO_OPT_INLINE void write(const float* param) {
    alignas(kLine) std::uint16_t narrow[kLogNumel];
    kGrad == Format::kBfloat16 || (kGrad == Format::kFloat32 && to_bf16) ? narrow_bf16(param, kLogNumel, narrow) : narrow_fp16(param, kLogNumel, narrow);
    const char* from = reinterpret_cast<const char*>(narrow);
    for (std::int64_t at = 0; at < kLogNumel * 2; at += kLine) {
      streams ? stream_line(from + at, out + at) : static_cast<void>(__builtin_memcpy(out + at, from + at, kLine));
    }
  }

  ZERO_OPT_INLINE void home(const LogBlock& log) {
    for (std::int64_t at = 0; at < kLogNumel; at += kLine / 4) {
      __builtin_memcpy(lanes.from.param + at, log.param + at, kLine);
      __builtin_memcpy(lanes.from.exp_avg + at, log.exp_avg + at, kLine);
      __builtin_memcpy(lanes.from.exp_avg_sq + at, log.exp_avg_sq + at, kLine);
      if (kAmsgrad) __builtin_memcpy(lanes.from.max_exp_avg_sq + at, log.max_exp_avg_sq + at, kLine);
    }
  }

  ZERO_OPT_INLINE void next() {
    lanes.from.param += kLogNumel;
    lanes.from.exp_avg += kLogNumel;
    lanes.from.exp_avg_sq += kLogNumel;
    if (kAmsgrad) lanes.from.max_exp_avg_sq += kLogNumel;
    if (kGrad == Format::kFloat32) lanes.grad += kLogNumel;
    if (kGrad == Format::kBfloat16) lanes.half_grad += kLogNumel;
    if (kGrad == Format::kFloat16) halves += kLogNumel;
    if (out != nullptr) out += kLogNumel * 2;
  }
};

template <Format kGrad, typename Use>
void with_straight_of(const AdamScalars& scalars, const AdamRun& run, std::int64_t begin, const Use& use) {
  const bool amsgrad = run.from.max_exp_avg_sq != nullptr;
  if (scalars.has_l2) {
    amsgrad ? use(Straight<kGrad, true, true>(scalars, run, begin))
            : use(Straight<kGrad, true, false>(scalars, run, begin));
  } else {
    amsgrad ? use(Straight<kGrad, false, true>(scalars, run, begin))
            : use(Straight<kGrad, false, false>(scalars, run, begin));
  }
}

// Calls ``use`` with the run's own Straight, at element begin.
template <typename Use>
void with_straight(const AdamScalars& scalars, const AdamRun& run, std::int64_t begin, const Use& use) {
  if (run.grad_format == Format::kFloat32) with_straight_of<Format::kFloat32>(scalars, run, begin, use);
  if (run.grad_format == Format::kBfloat16) with_straight_of<Format::kBfloat16>(scalars, run, begin, use);
  if (run.grad_format == Format::kFloat16) with_straight_of<Format::kFloat16>(scalars, run, begin, use);
}

}  // namespace
}  // namespace zero_opt
