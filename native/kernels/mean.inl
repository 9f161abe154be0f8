// The mean of several ranks' chunks, summed in rank order: included once by each isa_*.cpp, like adam.inl.
#pragma once

#include "kernels/float_formats.inl"
#include "kernels/kernels.hpp"

namespace zero_opt {
namespace {

// Elements summed at a time, so that partial sums stay in the nearest cache.
constexpr std::int64_t kMeanBlock = 2048;

// How an element is stored, and the type in which it is summed: rounded once, when it is stored.
struct PlainFloat {
  using Stored = float;
  using Sum = float;
  static Sum load(Stored stored) { return stored; }
  static Stored store(Sum sum) { return sum; }
};
struct PlainDouble {
  using Stored = double;
  using Sum = double;
  static Sum load(Stored stored) { return stored; }
  static Stored store(Sum sum) { return sum; }
};
struct Bfloat16 {
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored stored) { return bf16_to_float(stored); }
  static Stored store(Sum sum) { return float_to_bf16(sum); }
};
struct Float16 {
  using Stored = std::uint16_t;
  using Sum = float;
  static Sum load(Stored stored) { return fp16_to_float(stored); }
  static Stored store(Sum sum) { return float_to_fp16(sum); }
};

// Two ranks' chunks in one loop. Out shares no memory with the sources.
template <typename As>
void mean_of_two(const MeanRun& run) {
  using Stored = typename As::Stored;
  const Stored* first = static_cast<const Stored*>(run.sources[0]);
  const Stored* second = static_cast<const Stored*>(run.sources[1]);
  Stored* __restrict__ out = static_cast<Stored*>(run.out);
  const typename As::Sum count = 2;
  for (std::int64_t i = 0; i < run.numel; ++i) {  // vectorise
    out[i] = As::store((As::load(first[i]) + As::load(second[i])) / count);
  }
}

// A block of at most kMeanBlock elements from start on.
template <typename As>
void mean_block(const MeanRun& run, std::int64_t start, std::int64_t n) {
  using Stored = typename As::Stored;
  const Stored* first = static_cast<const Stored*>(run.sources[0]) + start;
  const Stored* second = static_cast<const Stored*>(run.sources[1]) + start;
  Stored* __restrict__ out = static_cast<Stored*>(run.out) + start;
  const typename As::Sum count = static_cast<typename As::Sum>(run.count);
  typename As::Sum total[kMeanBlock];
  for (std::int64_t i = 0; i < n; ++i) total[i] = As::load(first[i]) + As::load(second[i]);  // vectorise
  for (std::int32_t rank = 2; rank < run.count; ++rank) {
    const Stored* source = static_cast<const Stored*>(run.sources[rank]) + start;
    for (std::int64_t i = 0; i < n; ++i) total[i] += As::load(source[i]);  // vectorise
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const Stored mean = As::store(total[i] / count);
    out[i] = run.add ? As::store(As::load(out[i]) + As::load(mean)) : mean;
  }
}

template <typename As>
void mean_loop(const MeanRun& run) {
  if (run.count == 2 && !run.add) return mean_of_two<As>(run);
  for (std::int64_t start = 0; start < run.numel; start += kMeanBlock) {
    mean_block<As>(run, start, run.numel - start < kMeanBlock ? run.numel - start : kMeanBlock);
  }
}

void mean(const MeanRun& run) {
  if (run.format == Format::kFloat64) {
    mean_loop<PlainDouble>(run);
  } else if (run.format == Format::kBfloat16) {
    mean_loop<Bfloat16>(run);
  } else if (run.format == Format::kFloat16) {
    mean_loop<Float16>(run);
  } else {
    mean_loop<PlainFloat>(run);
  }
}

}  // namespace
}  // namespace zero_opt
