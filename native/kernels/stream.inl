// Stores past the caches: included once by each isa_*.cpp, like step_loop.inl.
#pragma once

#include <cstdint>

#include "kernels/float_formats.inl"
#include "kernels/kernels.hpp"

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

// Whole lines; both aligned to them if they are streamed.
ZERO_OPT_INLINE void write_lines(const void* lines, std::int64_t bytes, void* to, bool streams) {
  const char* from = static_cast<const char*>(lines);
  char* at = static_cast<char*>(to);
  for (const char* end = from + bytes; from < end; from += kLine, at += kLine) {
    streams ? stream_line(from, at) : static_cast<void>(__builtin_memcpy(at, from, kLine));
  }
}

}  // namespace
}  // namespace zero_opt
