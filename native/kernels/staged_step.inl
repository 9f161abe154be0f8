// The whole step in one read and one write of memory: included once by each isa_*.cpp, after adam.inl.
//
// The maths exists for fp32 arrays, and bf16 moments, only. Arrays in another format pass, kStaged elements at a time,
// through copies small enough to stay in the nearest cache, and long enough that it does not matter what a loop costs to
// begin and end, so that memory sees each byte once and the number of loops is the sum of the formats and not their
// product.
#pragma once

#include "kernels/adam.inl"
#include "kernels/block8_in_registers.inl"
#include "kernels/compact.inl"
#include "kernels/float_formats.inl"
#include "kernels/stream.inl"

namespace zero_opt {
namespace {

constexpr std::int64_t kStaged = 512;
static_assert(kStaged % kCutNumel == 0, "the blocks of 8-bit moments must not be cut");

struct alignas(64) Staging {
  float param[kStaged];
  float grad[kStaged];
  float out[kStaged];
  float exp_avg[kStaged];
  float exp_avg_sq[kStaged];
};

inline void widen_fp16(const std::uint16_t* __restrict__ from, std::int64_t n, float* __restrict__ to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = fp16_to_float(from[i]);  // vectorise
}

inline void narrow_bf16(const float* __restrict__ from, std::int64_t n, std::uint16_t* __restrict__ to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = float_to_bf16(from[i]);  // vectorise
}

inline void narrow_fp16(const float* __restrict__ from, std::int64_t n, std::uint16_t* __restrict__ to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = float_to_fp16(from[i]);  // vectorise
}

inline void copy_floats(const float* __restrict__ from, std::int64_t n, float* __restrict__ to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = from[i];
}

// n fp32 values from element start of an array: the array itself, or ``staged`` filled from it.
const float* read_floats(const void* array, Format format, std::int64_t start, std::int64_t n, float* staged) {
  if (format == Format::kFloat32) return static_cast<const float*>(array) + start;
  const std::uint16_t* narrow = static_cast<const std::uint16_t*>(array) + start;
  format == Format::kBfloat16 ? unpack_bf16(narrow, n, staged) : widen_fp16(narrow, n, staged);
  return staged;
}

void write_floats(void* array, Format format, std::int64_t start, std::int64_t n, const float* values) {
  std::uint16_t* narrow = static_cast<std::uint16_t*>(array) + start;
  if (format == Format::kFloat32) {
    copy_floats(values, n, static_cast<float*>(array) + start);
  } else if (format == Format::kBfloat16) {
    narrow_bf16(values, n, narrow);
  } else {
    narrow_fp16(values, n, narrow);
  }
}

void write_out(const AdamRun& run, std::int64_t start, std::int64_t n, const float* values, Staging& staging) {
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
void point_at_moments(const AdamArrays& arrays, Format format, std::int64_t start, LaneArrays& lanes) {
  if (format == Format::kFloat32) {
    lanes.exp_avg = static_cast<float*>(arrays.exp_avg) + start;
    lanes.exp_avg_sq = static_cast<float*>(arrays.exp_avg_sq) + start;
  } else {
    lanes.half_exp_avg = static_cast<std::uint16_t*>(arrays.exp_avg) + start;
    lanes.half_exp_avg_sq = static_cast<std::uint16_t*>(arrays.exp_avg_sq) + start;
  }
}

// Shows the loop the moments from element start on, a multiple of kCutNumel.
void read_moments(const AdamRun& run, std::int64_t start, Staging& staging, Lanes& lanes) {
  if (run.moment_format != Format::kBlock8) {
    point_at_moments(run.from, run.moment_format, start, lanes.from);
    point_at_moments(run.to, run.moment_format, start, lanes.to);
    return;
  }
  lanes.from.exp_avg = lanes.to.exp_avg = staging.exp_avg;
  lanes.from.exp_avg_sq = lanes.to.exp_avg_sq = staging.exp_avg_sq;
  decode_blocks(blocks_of(run, run.from, 0), start, lanes.numel, staging.exp_avg, staging.exp_avg_sq);
}

void write_moments(const AdamRun& run, std::int64_t start, std::uint32_t dither, const Lanes& lanes) {
  if (run.moment_format != Format::kBlock8) return;
  encode_blocks(blocks_of(run, run.to, dither), start, lanes.numel, lanes.to.exp_avg, lanes.to.exp_avg_sq);
}

// Points at a master as it lies, from element start on.
void point_at_param(const AdamArrays& arrays, std::int64_t start, LaneArrays& lanes) {
  if (arrays.remainder == nullptr) {
    lanes.param = static_cast<float*>(arrays.param) + start;
  } else {
    lanes.half_param = static_cast<std::uint16_t*>(arrays.param) + start;
    lanes.remainder = arrays.remainder + start;
  }
  if (arrays.max_exp_avg_sq != nullptr) lanes.max_exp_avg_sq = arrays.max_exp_avg_sq + start;
}

inline bool is_nonfinite(float value) {
  return static_cast<std::int32_t>(bits_of(value) & kMagnitude) >= static_cast<std::int32_t>(kInfinity);
}

inline std::int32_t count_nonfinite(const float* grad, std::int64_t n) {
  std::int32_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += is_nonfinite(grad[i]);  // vectorise
  return count;
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
std::int32_t adam_by_staging(const AdamScalars& scalars, const AdamRun& run, std::int64_t start, std::int64_t n,
                             Staging& staging) {
  Lanes lanes = {};
  lanes.numel = n;
  const bool converting = converts(scalars, run.from.max_exp_avg_sq != nullptr);
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
  const bool spoilt = adam_pick(scalars, lanes);
  write_moments(run, start, scalars.dither, lanes);
  if (staged) split_master(staging.param, n, to.half_param, to.remainder);
  if (run.out != nullptr) write_out(run, start, n, lanes.to.param, staging);
  return spoilt ? count_nonfinite(scalars.grad_factor, lanes) : 0;
}

// n elements from start, a multiple of kCutNumel.
std::int64_t adam_staged(const AdamScalars& scalars, const AdamRun& run, std::int64_t start, std::int64_t n,
                         Staging& staging) {
  std::int64_t nonfinite = 0;
  for (const std::int64_t end = start + n; start < end;) {
    std::int64_t most = kStaged;
#if defined(ZERO_OPT_HAS_AVX2)
    if (steps_blocks8(scalars, run)) {
      start += adam_blocks8(scalars, run, start, end) * kCutNumel;
      most = kCutNumel;
    }
#endif
    const std::int64_t next = end - start < most ? end - start : most;
    if (next > 0) nonfinite += adam_by_staging(scalars, run, start, next, staging);
    start += next;
  }
  return nonfinite;
}

// Squares of floats are exact in double, so a contraction could change nothing. The sums run in kSumLanes lanes,
// element i in lane i % kSumLanes, whatever the width of the registers; the compiler would not keep an array of
// lanes in registers, so here the vectors are spelled out.
constexpr std::int64_t kSumLanes = 32, kVectorLanes = 8;
typedef float Floats __attribute__((vector_size(kVectorLanes * sizeof(float))));
typedef double Doubles __attribute__((vector_size(kVectorLanes * sizeof(double))));

// Conversions are spelled out for the wide registers: of __builtin_convertvector GCC 12 makes two or four narrow ones.
inline void load(const float* from, Floats& values) { __builtin_memcpy(&values, from, sizeof(values)); }

inline void load(const std::uint16_t* from, Floats& values) {
#if defined(__AVX2__)
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  reinterpret_cast<__m256i&>(values) = _mm256_slli_epi32(words, 16);
#else
  unpack_bf16(from, kVectorLanes, reinterpret_cast<float*>(&values));
#endif
}

inline void add_squares(const Floats& values, Doubles& sums) {
#if defined(__AVX512F__)
  const __m512d wide = _mm512_maskz_cvtps_pd(0xff, reinterpret_cast<const __m256&>(values));
  reinterpret_cast<__m512d&>(sums) = _mm512_fmadd_pd(wide, wide, reinterpret_cast<const __m512d&>(sums));
#else
  const Doubles wide = __builtin_convertvector(values, Doubles);
  sums += wide * wide;
#endif
}

// Floats, or bf16 as its bits; n is a multiple of kSumLanes.
template <typename Number>
inline void add_squares(const Number* grad, std::int64_t n, double* lanes) {
  Doubles sums[kSumLanes / kVectorLanes];
  __builtin_memcpy(sums, lanes, sizeof(sums));
  for (std::int64_t start = 0; start < n; start += kSumLanes) {
    for (std::int64_t part = 0; part < kSumLanes / kVectorLanes; ++part) {
      Floats values;
      load(grad + start + part * kVectorLanes, values);
      add_squares(values, sums[part]);
    }
  }
  __builtin_memcpy(lanes, sums, sizeof(sums));
}

// Calls work(values, n) for every kStaged elements of an array, as floats.
template <typename Work>
inline void for_floats(const void* array, Format format, std::int64_t begin, std::int64_t end, const Work& work) {
  alignas(64) float staged[kStaged];
  for (std::int64_t start = begin; start < end; start += kStaged) {
    const std::int64_t n = end - start < kStaged ? end - start : kStaged;
    work(read_floats(array, format, start, n, staged), n);
  }
}

GradSum grad_sum(const void* grad, Format format, std::int64_t numel) {
  alignas(64) double lanes[kSumLanes] = {};
  const std::int64_t whole = numel - numel % kSumLanes;
  if (format == Format::kBfloat16) {
    add_squares(static_cast<const std::uint16_t*>(grad), whole, lanes);
  } else {
    for_floats(grad, format, 0, whole, [&](const float* values, std::int64_t n) { add_squares(values, n, lanes); });
  }
  for_floats(grad, format, whole, numel, [&](const float* values, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      const double value = values[i];
      lanes[i] += value * value;
    }
  });
  for (std::int64_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (std::int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  GradSum found = {lanes[0], 0};
  // The squares of finite floats do not add up to an infinity in double.
  if (!(found.squares <= __DBL_MAX__)) {
    for_floats(grad, format, 0, numel,
               [&](const float* values, std::int64_t n) { found.nonfinite += count_nonfinite(values, n); });
  }
  return found;
}

void convert(const ConvertRun& run) {
  if (run.to_format == Format::kFloat32) {
    float* to = static_cast<float*>(run.to);
    const float* from = read_floats(run.from, run.from_format, 0, run.numel, to);
    if (from != to) copy_floats(from, run.numel, to);
  } else {
    write_floats(run.to, run.to_format, 0, run.numel, static_cast<const float*>(run.from));
  }
}

}  // namespace
}  // namespace zero_opt
