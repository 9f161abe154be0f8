#include "step/step.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "threads/flush_denormals.hpp"
#include "threads/thread_pool.hpp"

namespace zero_opt {
namespace {

// What a thread takes at a time: long enough for the memory's prefetching, short enough to even out the threads.
constexpr std::int64_t kBlockNumel = 32768;
static_assert(kBlockNumel % kCutNumel == 0 && kBlockNumel % kSumNumel == 0, "cuts must not change bits");

// The blocks of several arrays, numbered through.
class Blocks {
 public:
  void add(std::int64_t numel) {
    numel_.push_back(numel);
    first_.push_back(count_);
    count_ += (numel + kBlockNumel - 1) / kBlockNumel;
    total_numel_ += numel;
  }
  std::int64_t count() const { return count_; }
  std::int64_t total_numel() const { return total_numel_; }

  // Calls work(array, begin, end) for the blocks from ``first`` on, before ``last``.
  template <typename Work>
  void visit(std::int64_t first, std::int64_t last, const Work& work) const {
    // Arrays of no elements share their number with the next one, which upper_bound finds.
    std::size_t array = std::upper_bound(first_.begin(), first_.end(), first) - first_.begin() - 1;
    for (std::int64_t block = first; block < last; ++block) {
      while (block - first_[array] >= (numel_[array] + kBlockNumel - 1) / kBlockNumel) ++array;
      const std::int64_t begin = (block - first_[array]) * kBlockNumel;
      work(array, begin, std::min(begin + kBlockNumel, numel_[array]));
    }
  }

 private:
  std::vector<std::int64_t> numel_, first_;
  std::int64_t count_ = 0, total_numel_ = 0;
};

// Calls work(array, begin, end) for all blocks, on as many threads as are wanted, useful and to be had.
template <typename Work>
void for_all_blocks(const Blocks& blocks, const Parallel& parallel, const Work& work) {
  // A pool thread has the mode of whoever used the pool first, which says nothing about this caller.
  const bool flush = parallel.flush_denormals || FlushDenormals::own();
  const bool alone = parallel.threads <= 1 || blocks.total_numel() <= kAloneNumel;
  const int threads = alone || blocks.count() < 2 ? 1 : usable_threads(parallel.threads);
  if (threads == 1) {
    const FlushDenormals mode(flush);
    if (blocks.count() > 0) blocks.visit(0, blocks.count(), work);
    return;
  }
  share_out(blocks.count(), threads, [&](std::int64_t block) {
    const FlushDenormals mode(flush);
    blocks.visit(block, block + 1, work);
  });
}

// The sum of values[0, count) by halves: their order is fixed and the rounding grows with the logarithm only.
double pairwise_sum(const double* values, std::size_t count) {
  if (count == 0) return 0.0;
  if (count == 1) return values[0];
  const std::size_t half = (count + 1) / 2;
  return pairwise_sum(values, half) + pairwise_sum(values + half, count - half);
}

}  // namespace

double step_of(const CountedRun& counted) {
  return counted.kept_step == nullptr ? counted.step : static_cast<double>(*counted.kept_step + 1.0f);
}

std::int64_t update_step(const Kernels& kernels, const std::vector<UpdateBatch>& batches, const Parallel& parallel) {
  Blocks blocks;
  std::vector<const UpdateRun*> runs;
  std::vector<std::size_t> scalars_of;
  std::vector<StepScalars> scalars;
  for_runs(batches, [&](const UpdateRun& run, const StepScalars* fresh) {
    if (fresh != nullptr) scalars.push_back(*fresh);
    blocks.add(run.numel);
    runs.push_back(&run);
    scalars_of.push_back(scalars.size() - 1);
  });
  std::atomic<std::int64_t> nonfinite{0};
  for_all_blocks(blocks, parallel, [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    const std::int64_t found = kernels.update(scalars[scalars_of[i]], *runs[i], begin, end);
    if (found != 0) nonfinite.fetch_add(found, std::memory_order_relaxed);
  });
  for (const UpdateBatch& batch : batches) {
    for (const CountedRun& counted : batch.runs) {
      if (counted.kept_step != nullptr) *counted.kept_step = static_cast<float>(step_of(counted));
    }
  }
  return nonfinite.load();
}

GradSum grad_sum(const Kernels& kernels, const std::vector<GradArray>& grads, const Parallel& parallel) {
  Blocks blocks;
  std::vector<std::size_t> first_sum;
  std::size_t sums = 0;
  for (const GradArray& grad : grads) {
    blocks.add(grad.squares == nullptr ? grad.numel : 0);
    first_sum.push_back(sums);
    sums += static_cast<std::size_t>((grad.numel + kSumNumel - 1) / kSumNumel);
  }
  std::vector<double> squares(sums);
  std::atomic<std::int64_t> nonfinite{0};
  const auto sum = [&](std::size_t i, std::int64_t start) {
    const void* data = static_cast<const char*>(grads[i].data) + start * bytes_of(grads[i].format);
    const GradSum found = kernels.grad_sum(data, grads[i].format, std::min(kSumNumel, grads[i].numel - start));
    squares[first_sum[i] + static_cast<std::size_t>(start / kSumNumel)] = found.squares;
    if (found.nonfinite != 0) nonfinite.fetch_add(found.nonfinite, std::memory_order_relaxed);
  };
  for_all_blocks(blocks, parallel, [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    for (std::int64_t start = begin; start < end; start += kSumNumel) sum(i, start);
  });
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].squares == nullptr) continue;
    for (std::int64_t start = 0; start < grads[i].numel; start += kSumNumel) {
      const std::int64_t number = start / kSumNumel;
      if (std::isfinite(grads[i].squares[number])) {
        squares[first_sum[i] + static_cast<std::size_t>(number)] = grads[i].squares[number];
      } else {
        sum(i, start);  // how many are not finite is to be counted
      }
    }
  }
  return {pairwise_sum(squares.data(), squares.size()), nonfinite.load()};
}

void copy_runs(const Kernels& kernels, const std::vector<CopyRun>& runs, int threads) {
  // As the blocks of arrays of floats: a thread's share need not be exact to the byte.
  constexpr std::int64_t kUnit = sizeof(float), kStreamUnits = 1 << 20;
  Blocks blocks;
  for (const CopyRun& run : runs) blocks.add((run.bytes + kUnit - 1) / kUnit);
  const bool stream = blocks.total_numel() >= kStreamUnits;
  const auto copy = [&](const char* from, char* to, std::int64_t bytes) {
    if (stream) {
      kernels.stream_copy(from, to, bytes);
    } else {
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
    }
  };
  for_all_blocks(blocks, {threads, false}, [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * kUnit, bytes = std::min(end * kUnit, runs[i].bytes) - first;
    const char* from = static_cast<const char*>(runs[i].from) + first;
    char* to = static_cast<char*>(runs[i].to) + first;
    if (runs[i].squares == nullptr) return copy(from, to, bytes);
    const std::int64_t width = bytes_of(runs[i].format), piece = kSumNumel * width;
    for (std::int64_t at = 0; at < bytes; at += piece) {
      const std::int64_t n = std::min(piece, bytes - at);
      runs[i].squares[(first + at) / piece] = kernels.grad_sum(from + at, runs[i].format, n / width).squares;
      copy(from + at, to + at, n);
    }
  });
}

}  // namespace zero_opt
