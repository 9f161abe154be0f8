#include "worker/draft_queue.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/dispatch.hpp"
#include "threads/flush_denormals.hpp"
#include "threads/thread_pool.hpp"
#include "worker/logged_step.hpp"

namespace zero_opt {
namespace {

// Makes the sums whose first block is in the range.
void make_sums(char* base, const Kernels& kernels, const DraftSum& sum, const BlockRange& range) {
  constexpr std::int64_t kSumBlocks = kSumNumel / kLogNumel;
  static_assert(kDraftBlocks % kSumBlocks == 0 && kSumNumel % kLogNumel == 0, "no sum may lie in two drafts");
  double* squares = reinterpret_cast<double*>(base + sum.squares);
  for (std::int64_t i = (range.first + kSumBlocks - 1) / kSumBlocks; i * kSumBlocks < range.last; ++i) {
    const std::int64_t begin = i * kSumNumel;
    const char* grad = base + sum.grad + begin * bytes_of(sum.format);
    squares[i] = kernels.grad_sum(grad, sum.format, std::min(kSumNumel, sum.numel - begin)).squares;
  }
}

// Drafts from first on, before last, that are made together.
class Batch {
 public:
  Batch(const Draft* drafts, std::uint64_t first, std::uint64_t most, std::int64_t most_blocks)
      : drafts_(drafts), first_(first), last_(first) {
    while (last_ < most && (last_ == first || blocks_ + count(last_) <= most_blocks)) blocks_ += count(last_++);
  }

  std::uint64_t last() const { return last_; }

  void make(const ArenaView& arena, std::size_t mapped_bytes, int threads) const {
    for (std::uint64_t i = first_; i < last_; ++i) {
      if (drafts_[i].arena_bytes > mapped_bytes) {
        throw std::runtime_error("the arena has grown since this worker was started");
      }
      kernels_named(drafts_[i].isa);
    }
    const std::int64_t lanes = arena.lane_count();
    const auto work = [&](std::int64_t lane) { make_part(arena.base(), blocks_of_lane(blocks_, lane, lanes)); };
    share_out(lanes, blocks_ * kLogNumel > kAloneNumel ? threads : 1, work);
  }

 private:
  std::int64_t count(std::uint64_t i) const { return drafts_[i].blocks.last - drafts_[i].blocks.first; }

  // Blocks are numbered through all drafts of the batch.
  void make_part(char* base, const BlockRange& part) const {
    std::int64_t before = 0;
    for (std::uint64_t i = first_; i < last_ && before < part.last; before += count(i++)) {
      const std::int64_t first = std::max(part.first - before, std::int64_t{0});
      const std::int64_t last = std::min(part.last - before, count(i));
      if (first >= last) continue;
      const Draft& draft = drafts_[i];
      const FlushDenormals mode(draft.flush_denormals != 0);
      const Kernels& kernels = kernels_named(draft.isa);
      const BlockRange range = {draft.blocks.first + first, draft.blocks.first + last};
      if (draft.sum.numel > 0) {
        make_sums(base, kernels, draft.sum, range);
      } else {
        kernels.run_draft(base, draft.run, range);
      }
    }
  }

  const Draft* drafts_;  // by number
  std::uint64_t first_, last_;
  std::int64_t blocks_ = 0;
};

}  // namespace

void finish_drafts(const ArenaView& arena, std::size_t mapped_bytes, int threads) {
  ControlBlock& control = arena.control();
  const std::uint64_t drafted = control.drafted.load(std::memory_order_acquire);
  const std::uint64_t origin = control.drafts_origin.load(std::memory_order_relaxed);
  std::uint64_t done = control.drafts_done.load(std::memory_order_relaxed);
  while (done < drafted) {
    done = std::max(done, std::min(control.drafts_void.load(std::memory_order_acquire), drafted));
    if (done < drafted) {
      const Batch batch(arena.drafts(), done - origin, drafted - origin, kDraftBlocks * threads);
      batch.make(arena, mapped_bytes, threads);
      done = batch.last() + origin;
    }
    control.drafts_done.store(done, std::memory_order_release);
  }
}

}  // namespace zero_opt
