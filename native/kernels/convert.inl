// Arrays of floats from one format to another: included once by each isa_*.cpp, like step_loop.inl.
#pragma once

#include <cstdint>

#include "kernels/compact.inl"
#include "kernels/float_formats.inl"
#include "kernels/kernels.hpp"

namespace zero_opt {
namespace {

// Elements that are converted at a time on their way: copies of so many stay in the nearest cache.
constexpr std::int64_t kStaged = 512;

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
