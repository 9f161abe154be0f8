// The kernels compiled for whatever the platform guarantees: SSE2 on x86-64, NEON on aarch64.
#include "adam.inl"

namespace zero_opt {

extern const Kernels kKernelsBaseline;
const Kernels kKernelsBaseline = {"baseline", adam, fma_loop};

}  // namespace zero_opt
