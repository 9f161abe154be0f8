// The kernels compiled for whatever the platform guarantees: SSE2 on x86-64, NEON on aarch64.
#include "mean.inl"
#include "one_pass.inl"

namespace zero_opt {

extern const Kernels kKernelsBaseline;
const Kernels kKernelsBaseline = {
    "baseline", adam, grad_sum, fma_loop, convert, pack_moments, unpack_moments};

extern const MeanKernels kMeanKernelsBaseline;
const MeanKernels kMeanKernelsBaseline = {mean_loop<float>, mean_loop<std::uint16_t>};

}  // namespace zero_opt
