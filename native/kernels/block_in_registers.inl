// The usual runs, stepped a whole block at a time, in place or into a log: included once by each isa_*.cpp, by those who
// do either.
#pragma once

#include "kernels/block8_in_registers.inl"
#include "kernels/redo_log.hpp"
#include "kernels/staged_step.inl"

#if defined(ZERO_OPT_HAS_AVX2)

namespace zero_opt {
namespace {

// Whether a run's whole blocks can be stepped in registers. By BlockInRegisters: fp32 moments, lerps that start from the
// moment, and parameters of the gradient's 16-bit format, if that is one; of split masters the usual step only.
inline bool steps_in_registers(const UpdateRun& run, const StepScalars& scalars) {
  if (steps_blocks8(run, scalars)) return true;
  if (!is_adam(scalars) || run.moment_format != Format::kFloat32 || predicts(scalars, run)) return false;
  if (!starts_from_moment(adam_in(scalars))) return false;
  if (run.from.remainder != nullptr) return run.out == nullptr && is_usual(scalars, run.from.max_exp_avg_sq != nullptr);
  return run.out == nullptr ||
         (run.out_format != Format::kFloat32 &&
          (run.out_format == run.grad_format || run.grad_format == Format::kFloat32));
}

// Steps a run of one kind, a whole block at a time, whose new state stays in registers until it is home. The length is a
// constant, from which the compiler makes straight-line code that decides nothing: for so few elements that would take
// as long as the step.
template <typename Update, Format kGrad, bool kSplit>
struct BlockInRegisters {
  static constexpr std::int64_t kParts = kLogNumel / kAvxNumel;

  AdamScalars scalars;
  float grad_factor;
  LaneArrays home_arrays;
  const float* grad;
  const std::uint16_t* half_grad;  // in place of grad: bf16, or fp16
  std::uint16_t* out;
  bool streams, to_bf16, past_caches = false;
  AvxFloats param[kParts], exp_avg[kParts], exp_avg_sq[kParts], max_exp_avg_sq[kParts];  // of the last block

  BlockInRegisters(const StepScalars& given, const UpdateRun& run, std::int64_t begin)
      : scalars(adam_in(given)), grad_factor(given.grad_factor), home_arrays{} {
    point_at_param(run.from, begin, home_arrays);
    point_at_moments(run.from, Format::kFloat32, begin, home_arrays);
    grad = static_cast<const float*>(run.grad) + begin;
    half_grad = static_cast<const std::uint16_t*>(run.grad) + begin;
    out = run.out == nullptr ? nullptr : static_cast<std::uint16_t*>(run.out) + begin;
    streams = run.numel >= kStreamNumel && reinterpret_cast<std::uintptr_t>(out) % kLine == 0;
    to_bf16 = run.out_format == Format::kBfloat16;
  }

  // A block into the arrays it was read from. Returns how many of its gradients are not finite.
  ZERO_OPT_INLINE std::int64_t step() { return step_to(home_arrays); }

  // The same, into a log; in registers it stays.
  ZERO_OPT_INLINE std::int64_t step(LogBlock& log) {
    LaneArrays arrays = {};
    arrays.param = log.param;
    arrays.half_param = reinterpret_cast<std::uint16_t*>(log.param);
    arrays.remainder = log.remainder;
    arrays.exp_avg = log.exp_avg;
    arrays.exp_avg_sq = log.exp_avg_sq;
    arrays.max_exp_avg_sq = log.max_exp_avg_sq;
    return step_to(arrays);
  }

  // Blocks go home past the caches from here on, if they are whole lines there.
  void leave_caches() {
    const auto place = [](const float* array) { return reinterpret_cast<std::uintptr_t>(array); };
    const std::uintptr_t arrays = place(home_arrays.param) | place(home_arrays.exp_avg) | place(home_arrays.exp_avg_sq) |
                                  place(home_arrays.max_exp_avg_sq);
    past_caches = arrays % kLine == 0;
  }

  ZERO_OPT_INLINE void home(const LogBlock&) { past_caches ? home<true>() : home<false>(); }

  ZERO_OPT_INLINE void next() {
    if (kSplit) {
      home_arrays.half_param += kLogNumel;
      home_arrays.remainder += kLogNumel;
    } else {
      home_arrays.param += kLogNumel;
    }
    home_arrays.exp_avg += kLogNumel;
    home_arrays.exp_avg_sq += kLogNumel;
    if (Update::kArrays > 2) home_arrays.max_exp_avg_sq += kLogNumel;
    grad += kLogNumel;
    half_grad += kLogNumel;
    if (out != nullptr) out += kLogNumel;
  }

 private:
  ZERO_OPT_INLINE std::int64_t step_to(const LaneArrays& to) {
    alignas(kLine) float widened_grad[kLogNumel];
    const float* grads = grad;
    if constexpr (kGrad == Format::kFloat16) {
      widen_fp16(half_grad, kLogNumel, widened_grad);
      grads = widened_grad;
    }
    AvxWords spoilt = {};
#pragma GCC unroll 8
    for (std::int64_t part = 0; part < kParts; ++part) {
      const std::int64_t at = part * kAvxNumel;
      AvxFloats g;
      if constexpr (kGrad == Format::kBfloat16) {
        g = grad_factor * (AvxFloats)(widened(half_grad + at) << 16);
      } else {
        g = grad_factor * read_floats_at(grads + at);
      }
      spoilt |= words_of(g * 0.0f);
      Element<AvxFloats> old = {};
      old.param = kSplit ? joined_at(home_arrays.half_param + at, home_arrays.remainder + at)
                         : read_floats_at(home_arrays.param + at);
      old.exp_avg = read_floats_at(home_arrays.exp_avg + at);
      old.exp_avg_sq = read_floats_at(home_arrays.exp_avg_sq + at);
      if constexpr (Update::kArrays > 2) old.max_exp_avg_sq = read_floats_at(home_arrays.max_exp_avg_sq + at);
      const Element<AvxFloats> stepped = Update::step(scalars, g, old);
      param[part] = stepped.param;
      exp_avg[part] = stepped.exp_avg;
      exp_avg_sq[part] = stepped.exp_avg_sq;
      max_exp_avg_sq[part] = stepped.max_exp_avg_sq;
      write<false>(part, to);
    }
    if (out != nullptr) write_out();
    return any_set(spoilt & kMagnitude) ? count(grads) : 0;
  }

  __attribute__((noinline)) std::int64_t count(const float* grads) const {
    Lanes seen = {};
    seen.numel = kLogNumel;
    seen.grad = grads;
    if (kGrad == Format::kBfloat16) seen.half_grad = half_grad;
    return count_nonfinite(grad_factor, seen);
  }

  ZERO_OPT_INLINE void write_out() const {
    if (kGrad == Format::kBfloat16 || (kGrad == Format::kFloat32 && to_bf16)) {
      for (std::int64_t part = 0; part < kParts; part += 2) {
        write_bf16(param[part], param[part + 1], out + part * kAvxNumel, streams);
      }
      return;
    }
    alignas(kLine) float wide[kLogNumel];
    alignas(kLine) std::uint16_t narrow[kLogNumel];
    __builtin_memcpy(wide, param, sizeof(wide));
    narrow_fp16(wide, kLogNumel, narrow);
    write_lines(narrow, sizeof(narrow), out, streams);
  }

  template <bool kPast>
  ZERO_OPT_INLINE void home() const {
#pragma GCC unroll 8
    for (std::int64_t part = 0; part < kParts; ++part) write<kPast>(part, home_arrays);
  }

  template <bool kPast>
  ZERO_OPT_INLINE static void put(AvxFloats values, float* to) {
    kPast ? stream((AvxWords)values, to) : store(values, to);
  }

  // Vector ``part``, or, of halves, it and the one before.
  template <bool kPast>
  ZERO_OPT_INLINE void write(std::int64_t part, const LaneArrays& to) const {
    const std::int64_t at = part * kAvxNumel;
    if constexpr (!kSplit) {
      put<kPast>(param[part], to.param + at);
    } else if (part % 2 != 0) {
      write_split(param[part - 1], param[part], to.half_param + at - kAvxNumel, to.remainder + at - kAvxNumel);
    }
    put<kPast>(exp_avg[part], to.exp_avg + at);
    put<kPast>(exp_avg_sq[part], to.exp_avg_sq + at);
    if constexpr (Update::kArrays > 2) put<kPast>(max_exp_avg_sq[part], to.max_exp_avg_sq + at);
  }
};

template <Format kGrad, typename Use>
void with_block_in_registers_of(const StepScalars& scalars, const UpdateRun& run, std::int64_t begin, const Use& use) {
  if (run.from.remainder != nullptr) {
    use(BlockInRegisters<UsualUpdate, kGrad, true>(scalars, run, begin));
    return;
  }
  with_adam_of<false>(adam_in(scalars), run.from.max_exp_avg_sq != nullptr, [&](auto update) {
    use(BlockInRegisters<decltype(update), kGrad, false>(scalars, run, begin));
  });
}

// Calls ``use`` with the run's own BlockInRegisters or Block8InRegisters, at element begin.
template <typename Use>
void with_block_in_registers(const StepScalars& scalars, const UpdateRun& run, std::int64_t begin, const Use& use) {
  if (run.moment_format == Format::kBlock8) {
    with_block8_in_registers(scalars, run, begin, use);
    return;
  }
  if (run.grad_format == Format::kFloat32) with_block_in_registers_of<Format::kFloat32>(scalars, run, begin, use);
  if (run.grad_format == Format::kBfloat16) with_block_in_registers_of<Format::kBfloat16>(scalars, run, begin, use);
  if (run.grad_format == Format::kFloat16) with_block_in_registers_of<Format::kFloat16>(scalars, run, begin, use);
}

}  // namespace
}  // namespace zero_opt
#else

namespace zero_opt {
namespace {

inline bool steps_in_registers(const UpdateRun&, const StepScalars&) { return false; }

template <typename Use>
void with_block_in_registers(const StepScalars&, const UpdateRun&, std::int64_t, const Use&) {}

}  // namespace
}  // namespace zero_opt
#endif
