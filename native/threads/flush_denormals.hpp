// Subnormal numbers taken as zero, on one thread and for a while.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace zero_opt {

// While it lives, this thread reads subnormal floats as zero and writes them as zero if ``on``, and as they are if not;
// then the thread's own mode is back.
class FlushDenormals {
 public:
  explicit FlushDenormals(bool on) : saved_(control()) { set_control(on ? saved_ | kFlush : saved_ & ~kFlush); }
  ~FlushDenormals() { set_control(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

  // Whether this thread flushes by itself.
  static bool own() { return kFlush != 0 && (control() & kFlush) == kFlush; }

 private:
#if defined(__SSE__)
  static constexpr std::uint64_t kFlush = 0x8040;  // MXCSR: flush to zero, denormals are zero
  static std::uint64_t control() { return _mm_getcsr(); }
  static void set_control(std::uint64_t value) { _mm_setcsr(static_cast<unsigned>(value)); }
#elif defined(__aarch64__)
  static constexpr std::uint64_t kFlush = 1ull << 24;  // FPCR.FZ
  static std::uint64_t control() {
    std::uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set_control(std::uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  static constexpr std::uint64_t kFlush = 0;
  static std::uint64_t control() { return 0; }
  static void set_control(std::uint64_t) {}
#endif

  std::uint64_t saved_;
};

}  // namespace zero_opt
