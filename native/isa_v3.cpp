// The kernels compiled for x86-64-v3 (AVX2, FMA).
#include "mean.inl"
#include "one_pass.inl"

namespace zero_opt {

extern const Kernels kKernelsV3;
const Kernels kKernelsV3 = {
    "v3", adam, grad_sum, fma_loop, convert, pack_moments, unpack_moments};

extern const MeanKernels kMeanKernelsV3;
const MeanKernels kMeanKernelsV3 = {mean_loop<float>, mean_loop<std::uint16_t>};

}  // namespace zero_opt
