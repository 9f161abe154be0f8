// The best instruction set, of those that kernels can be compiled for, that the processor and the operating system run.
//
// Asks the processor itself, since not every compiler's run-time library can tell: in a program that zig links,
// __builtin_cpu_supports() denies everything.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace zero_opt {

#if defined(__x86_64__)
struct CpuidAnswer {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // zero where the processor does not know the leaf

  explicit CpuidAnswer(unsigned leaf) { __get_cpuid_count(leaf, 0, &eax, &ebx, &ecx, &edx); }
};

inline bool has_bits(std::uint64_t value, std::uint64_t bits) { return (value & bits) == bits; }

// Which registers the operating system saves: the register XCR0.
inline std::uint64_t saved_registers() {
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

// The microarchitecture level of the x86-64 psABI: 1 (baseline), 3 or 4. Level 2 counts as 1, since no kernel is
// compiled for it.
inline int x86_64_level() {
  const CpuidAnswer basic(1), more(7), extended(0x80000001);
  // SSE3, SSSE3, FMA, CMPXCHG16B, SSE4.1, SSE4.2, MOVBE, POPCNT, OSXSAVE, AVX, F16C.
  constexpr std::uint64_t kBasic = 1u << 0 | 1u << 9 | 1u << 12 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 22 | 1u << 23 |
                                   1u << 27 | 1u << 28 | 1u << 29;
  constexpr std::uint64_t kExtended = 1u << 0 | 1u << 5;                                    // LAHF, LZCNT
  constexpr std::uint64_t kAvx2 = 1u << 3 | 1u << 5 | 1u << 8;                              // BMI1, AVX2, BMI2
  constexpr std::uint64_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F, DQ, CD, BW, VL
  constexpr std::uint64_t kYmm = 0x06, kZmm = 0xe6;
  if (!has_bits(basic.ecx, kBasic) || !has_bits(extended.ecx, kExtended) || !has_bits(more.ebx, kAvx2)) return 1;
  const std::uint64_t saved = saved_registers();  // an instruction that OSXSAVE promises
  if (!has_bits(saved, kYmm)) return 1;
  return has_bits(more.ebx, kAvx512) && has_bits(saved, kZmm) ? 4 : 3;
}
#else
inline int x86_64_level() { return 1; }
#endif

}  // namespace zero_opt
