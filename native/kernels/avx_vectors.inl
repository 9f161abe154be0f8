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
typedef std::uint16_t AvxHalves __attribute__((vector_size(kAvxNumel * 4)));
typedef std::int16_t AvxShorts __attribute__((vector_size(kAvxNumel * 4)));

// The words of 2 * kAvxNumel numbers that are read and written as halves: each is where one instruction takes halves
// apart and puts them together, which is another place than that of the number in memory.
struct AvxPair {
  AvxWords first, second;
};

#if defined(__AVX512F__)
// Of the plain forms of these intrinsics GCC 12 warns that a value, of which nothing is used, is not initialized.
constexpr __mmask16 kAll = 0xffff;

inline AvxFloats fma32(AvxFloats a, AvxFloats b, AvxFloats c) { return (AvxFloats)_mm512_fmadd_ps(a, b, c); }
inline AvxFloats root(AvxFloats a) { return (AvxFloats)_mm512_maskz_sqrt_ps(kAll, a); }

// So many numbers, each in a word of its own.
inline AvxWords widened(const std::uint16_t* from) {
  return (AvxWords)_mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline AvxWords widened(const std::int16_t* from) {
  return (AvxWords)_mm512_maskz_cvtepi16_epi32(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// The lower, or upper, halves of two vectors' words in order.
inline AvxWords halves_of(AvxWords first, AvxWords second, std::uint32_t which) {
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                        22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i order = (__m512i)((AvxWords)even + which * 0x10001u);
  return (AvxWords)_mm512_permutex2var_epi16((__m512i)first, order, (__m512i)second);
}
inline AvxWords lower_halves(AvxWords first, AvxWords second) { return halves_of(first, second, 0); }
inline AvxWords upper_halves(AvxWords first, AvxWords second) { return halves_of(first, second, 1); }

// Of bytes, with or without a sign, the halves.
inline AvxHalves widened(const std::uint8_t* from) {
  return (AvxHalves)_mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline AvxHalves widened(const std::int8_t* from) {
  return (AvxHalves)_mm512_maskz_cvtepi8_epi16(~0u, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Words of their lower and upper halves, and the other way.
inline AvxPair words_of(AvxHalves lower, AvxHalves upper) {
  return {(AvxWords)_mm512_unpacklo_epi16((__m512i)lower, (__m512i)upper),
          (AvxWords)_mm512_unpackhi_epi16((__m512i)lower, (__m512i)upper)};
}
inline AvxHalves halves_of(const AvxPair& words, std::uint32_t which) {
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 30, 28, 26, 24, 54, 52, 50, 48, 22, 20, 18, 16, 46, 44, 42, 40,
                                        14, 12, 10, 8, 38, 36, 34, 32, 6, 4, 2, 0);
  const __m512i order = (__m512i)((AvxWords)even + which * 0x10001u);
  return (AvxHalves)_mm512_permutex2var_epi16((__m512i)words.first, order, (__m512i)words.second);
}
inline AvxHalves lower_halves(const AvxPair& words) { return halves_of(words, 0); }
inline AvxHalves upper_halves(const AvxPair& words) { return halves_of(words, 1); }

// Of words as numbers with a sign: the nearest numbers without one, and with one; then of halves, but in other places,
// from which in_order brings them.
inline AvxHalves narrowed(const AvxPair& words) {
  return (AvxHalves)_mm512_packus_epi32((__m512i)words.first, (__m512i)words.second);
}
inline AvxHalves narrowed_signed(const AvxPair& words) {
  return (AvxHalves)_mm512_packs_epi32((__m512i)words.first, (__m512i)words.second);
}
inline AvxWords narrowed(AvxHalves first, AvxHalves second) {
  return (AvxWords)_mm512_packus_epi16((__m512i)first, (__m512i)second);
}
inline AvxWords narrowed_signed(AvxHalves first, AvxHalves second) {
  return (AvxWords)_mm512_packs_epi16((__m512i)first, (__m512i)second);
}
inline AvxWords in_order(AvxWords bytes) {
  return (AvxWords)_mm512_maskz_permutexvar_epi64(0xff, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), (__m512i)bytes);
}

// Less what is taken from them, at least 0; plus an addend where they have some of the bits; the smaller, the larger.
inline AvxHalves reduced(AvxHalves a, AvxHalves b) { return (AvxHalves)_mm512_subs_epu16((__m512i)a, (__m512i)b); }
inline AvxHalves raised_where(AvxHalves which, AvxHalves bits, AvxHalves a, AvxHalves addend) {
  const __mmask32 mask = _mm512_test_epi16_mask((__m512i)which, (__m512i)bits);
  return (AvxHalves)_mm512_mask_add_epi16((__m512i)a, mask, (__m512i)a, (__m512i)addend);
}
inline AvxHalves smaller(AvxHalves a, AvxHalves b) { return (AvxHalves)_mm512_min_epu16((__m512i)a, (__m512i)b); }
inline AvxHalves larger(AvxHalves a, AvxHalves b) { return (AvxHalves)_mm512_max_epu16((__m512i)a, (__m512i)b); }

// Words in the order of memory, in the places that those of halves have, and the other way.
inline AvxPair paired(AvxWords first, AvxWords second) {
  return {(AvxWords)_mm512_maskz_shuffle_i32x4(kAll, (__m512i)first, (__m512i)second, 0x88),
          (AvxWords)_mm512_maskz_shuffle_i32x4(kAll, (__m512i)first, (__m512i)second, 0xdd)};
}
inline AvxPair unpaired(const AvxPair& words) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  return {(AvxWords)_mm512_permutex2var_epi64((__m512i)words.first, low, (__m512i)words.second),
          (AvxWords)_mm512_permutex2var_epi64((__m512i)words.first, high, (__m512i)words.second)};
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

inline AvxHalves widened(const std::uint8_t* from) {
  return (AvxHalves)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline AvxHalves widened(const std::int8_t* from) {
  return (AvxHalves)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline AvxPair words_of(AvxHalves lower, AvxHalves upper) {
  return {(AvxWords)_mm256_unpacklo_epi16((__m256i)lower, (__m256i)upper),
          (AvxWords)_mm256_unpackhi_epi16((__m256i)lower, (__m256i)upper)};
}
inline AvxHalves narrowed(const AvxPair& words) {
  return (AvxHalves)_mm256_packus_epi32((__m256i)words.first, (__m256i)words.second);
}
inline AvxHalves narrowed_signed(const AvxPair& words) {
  return (AvxHalves)_mm256_packs_epi32((__m256i)words.first, (__m256i)words.second);
}
inline AvxHalves lower_halves(const AvxPair& words) {
  return narrowed({words.first & 0xffffu, words.second & 0xffffu});
}
inline AvxHalves upper_halves(const AvxPair& words) { return narrowed({words.first >> 16, words.second >> 16}); }
inline AvxWords narrowed(AvxHalves first, AvxHalves second) {
  return (AvxWords)_mm256_packus_epi16((__m256i)first, (__m256i)second);
}
inline AvxWords narrowed_signed(AvxHalves first, AvxHalves second) {
  return (AvxWords)_mm256_packs_epi16((__m256i)first, (__m256i)second);
}
inline AvxWords in_order(AvxWords bytes) { return (AvxWords)_mm256_permute4x64_epi64((__m256i)bytes, 0xd8); }

inline AvxHalves reduced(AvxHalves a, AvxHalves b) { return (AvxHalves)_mm256_subs_epu16((__m256i)a, (__m256i)b); }
// Where the highest of the bits is among them the addend may be negated: 0x8000, and no other, is what it was.
inline AvxHalves raised_where(AvxHalves which, AvxHalves bits, AvxHalves a, AvxHalves addend) {
  return a + (AvxHalves)_mm256_sign_epi16((__m256i)addend, (__m256i)(which & bits));
}
inline AvxHalves smaller(AvxHalves a, AvxHalves b) { return (AvxHalves)_mm256_min_epu16((__m256i)a, (__m256i)b); }
inline AvxHalves larger(AvxHalves a, AvxHalves b) { return (AvxHalves)_mm256_max_epu16((__m256i)a, (__m256i)b); }

inline AvxPair paired(AvxWords first, AvxWords second) {
  return {(AvxWords)_mm256_permute2x128_si256((__m256i)first, (__m256i)second, 0x20),
          (AvxWords)_mm256_permute2x128_si256((__m256i)first, (__m256i)second, 0x31)};
}
inline AvxPair unpaired(const AvxPair& words) { return paired(words.first, words.second); }
inline bool any_set(AvxWords words) { return _mm256_testz_si256((__m256i)words, (__m256i)words) == 0; }
inline void stream(AvxWords words, void* to) { _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)words); }
inline __m256i largest_of_halves(AvxWords words) { return (__m256i)words; }
#endif

inline AvxFloats read_floats_at(const float* from) {
  AvxFloats values;
  __builtin_memcpy(&values, from, sizeof(values));
  return values;
}

inline AvxHalves read_halves_at(const void* from) {
  AvxHalves halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  return halves;
}

inline AvxWords words_of(AvxFloats values) { return (AvxWords)values; }

template <typename Vector>
inline void store(Vector values, void* to) {
  __builtin_memcpy(to, &values, sizeof(values));
}

}  // namespace
}  // namespace zero_opt
#endif
