// The mean of several ranks' chunks, summed in rank order: included once by each isa_*.cpp, like adam.inl.
#pragma once

#include "float_formats.inl"
#include "mean.hpp"

namespace zero_opt {
namespace {

// Elements summed at a time, so that partial sums stay in the nearest cache.
constexpr std::int64_t kMeanBlock = 2048;

inline float load(const float* source, std::int64_t i) { return source[i]; }
inline float load(const std::uint16_t* source, std::int64_t i) { return bf16_to_float(source[i]); }
inline void store(float* out, std::int64_t i, float value) { out[i] = value; }
inline void store(std::uint16_t* out, std::int64_t i, float value) { out[i] = float_to_bf16(value); }

// Out shares no memory with the sources.
template <typename T>
void mean_loop(const MeanRun& run) {
  const float count = static_cast<float>(run.count);
  const T* first = static_cast<const T*>(run.sources[0]);
  const T* second = static_cast<const T*>(run.sources[1]);
  T* __restrict__ out = static_cast<T*>(run.out);
  if (run.count == 2) {
    for (std::int64_t i = 0; i < run.numel; ++i) store(out, i, (load(first, i) + load(second, i)) / count);
    return;
  }
  float total[kMeanBlock];
  for (std::int64_t start = 0; start < run.numel; start += kMeanBlock) {
    const std::int64_t n = run.numel - start < kMeanBlock ? run.numel - start : kMeanBlock;
    for (std::int64_t i = 0; i < n; ++i) total[i] = load(first, start + i) + load(second, start + i);
    for (std::int32_t rank = 2; rank < run.count; ++rank) {
      const T* source = static_cast<const T*>(run.sources[rank]);
      for (std::int64_t i = 0; i < n; ++i) total[i] += load(source, start + i);
    }
    for (std::int64_t i = 0; i < n; ++i) store(out, start + i, total[i] / count);
  }
}

}  // namespace
}  // namespace zero_opt
