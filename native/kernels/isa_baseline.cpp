// The kernels compiled for whatever the platform guarantees: SSE2 on x86-64, NEON on aarch64.
#include "kernels/convert.inl"
#include "kernels/copy.inl"
#include "kernels/draft.inl"
#include "kernels/grad_sum.inl"
#include "kernels/in_place.inl"
#include "kernels/mean.inl"
#include "kernels/redo_log.inl"

namespace zero_opt {

extern const Kernels kKernelsBaseline;
const Kernels kKernelsBaseline = {
    "baseline", update, run_lane, run_draft, grad_sum, stream_copy, fma_loop, convert, mean, pack_moments, unpack_moments};

}  // namespace zero_opt
