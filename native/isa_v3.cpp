// The kernels compiled for x86-64-v3 (AVX2, FMA).
#include "copy.inl"
#include "draft.inl"
#include "in_place.inl"
#include "mean.inl"
#include "one_pass.inl"
#include "redo_log.inl"

namespace zero_opt {

extern const Kernels kKernelsV3;
const Kernels kKernelsV3 = {
    "v3", adam, run_lane, run_draft, grad_sum, stream_copy, fma_loop, convert, mean, pack_moments, unpack_moments};

}  // namespace zero_opt
