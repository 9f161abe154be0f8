// Memory ahead of the loops, and stores past the caches: included once by each isa_*.cpp, like adam.inl.
#pragma once

#include <cstdint>

#include "float_formats.inl"
#include "kernels.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace zero_opt {
namespace {

// An array that is written but not read need not be fetched first: past the caches, whole lines at a time. A run
// shorter than this is better left in them, for whoever reads it next.
constexpr std::int64_t kStreamNumel = 1 << 20, kLine = 64;

inline void stream_line(const char* from, char* to) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_load_si512(from));
#elif defined(__AVX__)
  for (int i = 0; i < 2; ++i) {
    const __m256i half = _mm256_load_si256(reinterpret_cast<const __m256i*>(from) + i);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + i, half);
  }
#elif defined(__SSE2__)
  for (int i = 0; i < 4; ++i) {
    const __m128i quarter = _mm_load_si128(reinterpret_cast<const __m128i*>(from) + i);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, quarter);
  }
#else
  __builtin_memcpy(to, from, kLine);
#endif
}

// Streamed stores are seen by other threads only after this.
inline void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Asks for the memory that the loops come to next but three. They are too short for the processor to see by itself
// where they are going.
constexpr std::int64_t kAhead = 2048;

inline void prefetch(const void* array, std::int64_t bytes, std::int64_t start, std::int64_t n) {
  if (array == nullptr) return;
  const char* first = static_cast<const char*>(array) + start * bytes;
  for (std::int64_t at = 0; at < n * bytes; at += 64) __builtin_prefetch(first + at, 1);
}

inline void prefetch_run(const AdamRun& run, std::int64_t start, std::int64_t n) {
  prefetch(run.from.param, run.from.remainder == nullptr ? 4 : 2, start, n);
  prefetch(run.from.remainder, 2, start, n);
  prefetch(run.grad, bytes_of(run.grad_format), start, n);
  prefetch(run.from.exp_avg, bytes_of(run.moment_format), start, n);
  prefetch(run.from.exp_avg_sq, bytes_of(run.moment_format), start, n);
  prefetch(run.from.max_exp_avg_sq, 4, start, n);
  if (run.numel < kStreamNumel) prefetch(run.out, bytes_of(run.out_format), start, n);
}

#if defined(ZERO_OPT_HAS_WIDE)
// A block of parameters in registers, in bf16 to where they go.
constexpr std::int64_t kParts = kCutNumel / kWide;

ZERO_OPT_INLINE void write_bf16(const WideFloats* params, std::uint16_t* to, bool streams) {
#pragma GCC unroll 4
  for (std::int64_t part = 0; part < kParts; part += 2, to += 2 * kWide) {
    const WideWords halves =
        upper_halves(rounded_bf16<WideWords>(params[part]), rounded_bf16<WideWords>(params[part + 1]));
    streams ? stream(halves, to) : store(halves, to);
  }
}
#endif

}  // namespace
}  // namespace zero_opt
