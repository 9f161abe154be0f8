// The kernels compiled for x86-64-v3 (AVX2, FMA).
#include "kernels/convert.inl"
#include "kernels/copy.inl"
#include "kernels/draft.inl"
#include "kernels/grad_sum.inl"
#include "kernels/in_place.inl"
#include "kernels/mean.inl"
#include "kernels/redo_log.inl"

namespace zero_opt {

extern const Kernels kKernelsV3;
const Kernels kKernelsV3 = {
    "v3", update, run_lane, run_draft, grad_sum, stream_copy, fma_loop, convert, mean, pack_moments, unpack_moments};

}  // namespace zero_opt
