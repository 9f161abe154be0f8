// The mean of several ranks' chunks, summed in tree order (see comm/exchange.py): included once by each isa_*.cpp, like step_loop.inl.
#pragma once

#include "kernels/float_formats.inl"
#include "kernels/kernels.hpp"

namespace zero_opt {
namespace {

// Elements summed at a time, so that the partial sums, one per power of two ranks, stay in the nearest cache.
constexpr std::int64_t kMeanBlock = 1024;

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

// Two ranks' chunks in one loop. Out may be one of them.
template <typename As>
void mean_of_two(const MeanRun& run) {
  using Stored = typename As::Stored;
  const Stored* first = static_cast<const Stored*>(run.sources[0]);
  const Stored* second = static_cast<const Stored*>(run.sources[1]);
  Stored* out = static_cast<Stored*>(run.out);
  const typename As::Sum count = 2;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < run.numel; ++i) {  // vectorise
    out[i] = As::store((As::load(first[i]) + As::load(second[i])) / count);
  }
}

// Elements of the sources, at most kMeanBlock, from ``start`` on.
struct Stretch {
  std::int64_t start, n;
};

template <typename As>
const typename As::Stored* chunk(const MeanRun& run, std::int32_t rank, const Stretch& stretch) {
  return static_cast<const typename As::Stored*>(run.sources[rank]) + stretch.start;
}

// Writes the sum of ranks low to high, at least two, to ``total``.
template <typename As>
void tree_sum(const MeanRun& run, std::int32_t low, std::int32_t high, const Stretch& stretch, typename As::Sum* total) {
  const auto *first = chunk<As>(run, low, stretch), *second = chunk<As>(run, low + 1, stretch);
  if (high - low == 2) {
    for (std::int64_t i = 0; i < stretch.n; ++i) total[i] = As::load(first[i]) + As::load(second[i]);  // vectorise
    return;
  }
  if (high - low == 4) {
    const auto *third = chunk<As>(run, low + 2, stretch), *fourth = chunk<As>(run, low + 3, stretch);
    for (std::int64_t i = 0; i < stretch.n; ++i) {  // vectorise
      total[i] = (As::load(first[i]) + As::load(second[i])) + (As::load(third[i]) + As::load(fourth[i]));
    }
    return;
  }
  std::int32_t half = 1;
  while (2 * half < high - low) half *= 2;
  const std::int32_t middle = low + half;
  tree_sum<As>(run, low, middle, stretch, total);
  if (high - middle == 1) {
    const auto* last = chunk<As>(run, middle, stretch);
    for (std::int64_t i = 0; i < stretch.n; ++i) total[i] += As::load(last[i]);  // vectorise
    return;
  }
  typename As::Sum rest[kMeanBlock];
  tree_sum<As>(run, middle, high, stretch, rest);
  for (std::int64_t i = 0; i < stretch.n; ++i) total[i] += rest[i];  // vectorise
}

template <typename As>
void mean_block(const MeanRun& run, const Stretch& stretch) {
  auto* out = static_cast<typename As::Stored*>(run.out) + stretch.start;
  const typename As::Sum divisor = static_cast<typename As::Sum>(run.divisor);
  typename As::Sum total[kMeanBlock];
  tree_sum<As>(run, 0, run.count, stretch, total);
  for (std::int64_t i = 0; i < stretch.n; ++i) {
    const typename As::Stored mean = As::store(total[i] / divisor);
    out[i] = run.add ? As::store(As::load(out[i]) + As::load(mean)) : mean;
  }
}

template <typename As>
void mean_loop(const MeanRun& run) {
  if (run.count == 2 && run.divisor == 2 && !run.add) return mean_of_two<As>(run);
  for (std::int64_t start = 0; start < run.numel; start += kMeanBlock) {
    mean_block<As>(run, {start, run.numel - start < kMeanBlock ? run.numel - start : kMeanBlock});
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
