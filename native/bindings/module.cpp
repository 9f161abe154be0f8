// The extension module. Tensors arrive as raw addresses, checked by zero_opt/kernels, or are read by DLPack's C
// interface, so that one binary serves every version of torch.
#include "bindings/bindings.hpp"

#include <pthread.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <ctime>

// Python's headers were configured on the machine that builds a wheel, which may be for another.
static_assert(sizeof(void*) == SIZEOF_VOID_P && sizeof(std::uintptr_t) == SIZEOF_UINTPTR_T &&
              sizeof(std::size_t) == SIZEOF_SIZE_T && sizeof(bool) == SIZEOF__BOOL && sizeof(int) == SIZEOF_INT &&
              sizeof(long) == SIZEOF_LONG && sizeof(long long) == SIZEOF_LONG_LONG &&
              sizeof(long double) == SIZEOF_LONG_DOUBLE && sizeof(wchar_t) == SIZEOF_WCHAR_T &&
              sizeof(pid_t) == SIZEOF_PID_T && sizeof(pthread_t) == SIZEOF_PTHREAD_T &&
              sizeof(std::time_t) == SIZEOF_TIME_T);

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native kernels of zero_opt. Addresses and sizes go in unchecked: call zero_opt.cpu_adam instead.";
  m.attr("interface") = std::uint64_t{ZERO_OPT_INTERFACE};
  zero_opt::bindings::bind_kernels(m);
  zero_opt::bindings::bind_threads(m);
  zero_opt::bindings::bind_step(m);
  zero_opt::bindings::bind_exchange(m);
  zero_opt::bindings::bind_worker(m);
  zero_opt::bindings::bind_many(m);
  zero_opt::bindings::bind_arrivals(m);
}
