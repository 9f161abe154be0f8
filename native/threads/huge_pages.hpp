// Fewer and larger pages for large arrays: their addresses need not be looked up as often.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace zero_opt {

// Asks for huge pages for those that lie wholly in an array. Pages that exist stay as they are, so ask before the first
// write. A wish only: the system may not have any.
inline void prefer_huge_pages(std::uintptr_t address, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePage = std::uintptr_t{1} << 21;
  const std::uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)address;
  (void)bytes;
#endif
}

}  // namespace zero_opt
