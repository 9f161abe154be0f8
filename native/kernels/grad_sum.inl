// Squares of gradients, added up, and gradients that are not finite: included once by each isa_*.cpp, like step_loop.inl.
#pragma once

#include <cstdint>

#include "kernels/convert.inl"
#include "kernels/float_formats.inl"
#include "kernels/kernels.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace zero_opt {
namespace {

inline std::int32_t count_nonfinite(const float* grad, std::int64_t n) {
  std::int32_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) count += is_nonfinite(grad[i]);  // vectorise
  return count;
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

}  // namespace
}  // namespace zero_opt
