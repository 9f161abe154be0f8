// Vectors as wide as the registers, for what the compiler does not make of a loop: included once by each isa_*.cpp, by
// float_formats.inl. Where there are none, what is written with them is left out.
#pragma once

#include <cstdint>

#if defined(__AVX2__) && defined(__FMA__)
#define ZERO_OPT_HAS_AVX2
#include <immintrin.h>

namespace zero_opt {
namespace {

#if defined(__AVX512F__)
constexpr std::int64_t kAvxNumel = 16;
#else
constexpr std::int64_t kAvxNumel = 8;
#endif

typedef float AvxFloats __attribute__((vector_size(kAvxNumel * 4)));
typedef std::uint32_t AvxWords __attribute__((vector_size(kAvxNumel * 4)));
typedef std::int32_t AvxInts __attribute__((vector_size(kAvxNumel * 4)));

#if defined(__AVX512F__)
// Of the plain forms of these intrinsics GCC 12 warns that a value, of which nothing is used, is not initialized.
constexpr __mmask16 kAll = 0xffff;

inline AvxFloats fma32(AvxFloats a, AvxFloats b, AvxFloats c) { return (AvxFloats)_mm512_fmadd_ps(a, b, c); }
inline AvxFloats root(AvxFloats a) { return (AvxFloats)_mm512_maskz_sqrt_ps(kAll, a); }

// So many numbers, each in a word of its own.
inline AvxWords widened(const std::uint8_t* from) {
  return (AvxWords)_mm512_maskz_cvtepu8_epi32(kAll, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline AvxWords widened(const std::uint16_t* from) {
  return (AvxWords)_mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline AvxWords widened(const std::int16_t* from) {
  return (AvxWords)_mm512_maskz_cvtepi16_epi32(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// The lower, or upper, halves of two vectors' words in order, and the lowest bytes of four's, which have no others.
inline AvxWords halves_of(AvxWords first, AvxWords second, std::uint32_t which) {
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                        22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i order = (__m512i)((AvxWords)even + which * 0x10001u);
  return (AvxWords)_mm512_permutex2var_epi16((__m512i)first, order, (__m512i)second);
}
inline AvxWords lower_halves(AvxWords first, AvxWords second) { return halves_of(first, second, 0); }
inline AvxWords upper_halves(AvxWords first, AvxWords second) { return halves_of(first, second, 1); }
inline AvxWords bytes_of(const AvxWords* words) {
  const __m512i front = _mm512_packus_epi32((__m512i)words[0], (__m512i)words[1]);
  const __m512i back = _mm512_packus_epi32((__m512i)words[2], (__m512i)words[3]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return (AvxWords)_mm512_maskz_permutexvar_epi32(kAll, order, _mm512_packus_epi16(front, back));
}
inline bool any_set(AvxWords words) { return _mm512_test_epi32_mask((__m512i)words, (__m512i)words) != 0; }
inline void stream(AvxWords words, void* to) { _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)words); }

// Of both halves of the vector the larger 16-bit numbers.
inline __m256i largest_of_halves(AvxWords words) {
  __m256i low;
  __builtin_memcpy(&low, &words, sizeof(low));
  return _mm256_max_epu16(low, _mm512_maskz_extracti64x4_epi64(0xf, (__m512i)words, 1));
}
#else
inline AvxFloats fma32(AvxFloats a, AvxFloats b, AvxFloats c) { return (AvxFloats)_mm256_fmadd_ps(a, b, c); }
inline AvxFloats root(AvxFloats a) { return (AvxFloats)_mm256_sqrt_ps(a); }

inline AvxWords widened(const std::uint8_t* from) {
  return (AvxWords)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline AvxWords widened(const std::uint16_t* from) {
  return (AvxWords)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline AvxWords widened(const std::int16_t* from) {
  return (AvxWords)_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline AvxWords lower_halves(AvxWords first, AvxWords second) {
  const __m256i pairs = _mm256_packus_epi32((__m256i)(first & 0xffffu), (__m256i)(second & 0xffffu));
  return (AvxWords)_mm256_permute4x64_epi64(pairs, 0xd8);
}
inline AvxWords upper_halves(AvxWords first, AvxWords second) { return lower_halves(first >> 16, second >> 16); }
inline AvxWords bytes_of(const AvxWords* words) {
  const __m256i front = _mm256_packus_epi32((__m256i)words[0], (__m256i)words[1]);
  const __m256i back = _mm256_packus_epi32((__m256i)words[2], (__m256i)words[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return (AvxWords)_mm256_permutevar8x32_epi32(_mm256_packus_epi16(front, back), order);
}
inline bool any_set(AvxWords words) { return _mm256_testz_si256((__m256i)words, (__m256i)words) == 0; }
inline void stream(AvxWords words, void* to) { _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)words); }
inline __m256i largest_of_halves(AvxWords words) { return (__m256i)words; }
#endif

inline AvxFloats read_floats_at(const float* from) {
  AvxFloats values;
  __builtin_memcpy(&values, from, sizeof(values));
  return values;
}

inline AvxWords words_of(AvxFloats values) { return (AvxWords)values; }

template <typename Vector>
inline void store(Vector values, void* to) {
  __builtin_memcpy(to, &values, sizeof(values));
}

}  // namespace
}  // namespace zero_opt
#endif
