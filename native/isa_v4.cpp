// The kernels compiled for x86-64-v4 (AVX-512 F, BW, CD, DQ, VL).
#include "mean.inl"
#include "one_pass.inl"

namespace zero_opt {

extern const Kernels kKernelsV4;
const Kernels kKernelsV4 = {
    "v4", adam, grad_sum, fma_loop, convert, pack_moments, unpack_moments};

extern const MeanKernels kMeanKernelsV4;
const MeanKernels kMeanKernelsV4 = {mean_loop<float>, mean_loop<std::uint16_t>};

}  // namespace zero_opt
