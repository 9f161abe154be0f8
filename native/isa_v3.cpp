// The kernels compiled for x86-64-v3 (AVX2, FMA).
#include "adam.inl"

namespace zero_opt {

extern const Kernels kKernelsV3;
const Kernels kKernelsV3 = {"v3", adam, fma_loop};

}  // namespace zero_opt
