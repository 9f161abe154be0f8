// The kernels compiled for x86-64-v3 (AVX2, FMA).
#include "adam.inl"
#include "mean.inl"

namespace zero_opt {

extern const Kernels kKernelsV3;
const Kernels kKernelsV3 = {"v3", adam, fma_loop};

extern const MeanKernels kMeanKernelsV3;
const MeanKernels kMeanKernelsV3 = {mean_loop<float>, mean_loop<std::uint16_t>};

}  // namespace zero_opt
