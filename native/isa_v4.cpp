// The kernels compiled for x86-64-v4 (AVX-512 F, BW, CD, DQ, VL).
#include "adam.inl"

namespace zero_opt {

extern const Kernels kKernelsV4;
const Kernels kKernelsV4 = {"v4", adam, fma_loop};

}  // namespace zero_opt
