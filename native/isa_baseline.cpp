// The kernels compiled for whatever the platform guarantees: SSE2 on x86-64, NEON on aarch64.
#include "adam.inl"
#include "mean.inl"

namespace zero_opt {

extern const Kernels kKernelsBaseline;
const Kernels kKernelsBaseline = {"baseline", adam, fma_loop};

extern const MeanKernels kMeanKernelsBaseline;
const MeanKernels kMeanKernelsBaseline = {mean_loop<float>, mean_loop<std::uint16_t>};

}  // namespace zero_opt
