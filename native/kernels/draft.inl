// The kernel of draft.hpp: included once by each isa_*.cpp, after redo_log.inl.
#pragma once

#include "kernels/draft.hpp"
#include "kernels/redo_log.inl"

namespace zero_opt {
namespace {

// As copy_array, past the caches where it may: nobody reads a bank before it is committed.
inline void stream_array(const void* fresh, std::int64_t begin, std::int64_t n, std::int64_t width, void* home) {
  if (home == nullptr) return;
  char* to = static_cast<char*>(home) + begin * width;
  const bool whole_lines = reinterpret_cast<std::uintptr_t>(to) % kLine == 0 && n * width % kLine == 0;
  if (!whole_lines) {
    copy_array(fresh, begin, n, width, home);
    return;
  }
  write_lines(fresh, n * width, to, true);
}

void stream_block(const StateArrays& to, Format moments, const Block& block, const LogBlock& fresh) {
  const std::int64_t begin = block.begin, n = block.end - begin, moment = bytes_of(moments);
  stream_array(fresh.param, begin, n, to.remainder == nullptr ? 4 : 2, to.param);
  stream_array(fresh.remainder, begin, n, 2, to.remainder);
  stream_array(fresh.exp_avg, begin, n, moment, to.exp_avg);
  stream_array(fresh.exp_avg_sq, begin, n, moment, to.exp_avg_sq);
  stream_array(fresh.max_exp_avg_sq, begin, n, 4, to.max_exp_avg_sq);
  const std::int64_t first = begin / kCutNumel, count = (n + kCutNumel - 1) / kCutNumel;
  copy_array(fresh.exp_avg_base, first, count, 2, to.exp_avg_base);
  copy_array(fresh.exp_avg_sq_base, first, count, 2, to.exp_avg_sq_base);
}

// The blocks of a draft from element begin to end.
template <typename Stepper>
void draft_blocks(Stepper at, const StateArrays& to, Format moments, const Block& all, LogBlock& fresh) {
  for (std::int64_t begin = all.begin; begin < all.end; begin += kLogNumel, at.next()) {
    at.step(fresh);
    stream_block(to, moments, {all.run, begin, end_of_block(all.end, begin)}, fresh);
  }
}

void run_draft(char* base, const DraftRun& draft, const BlockRange& range) {
  const UpdateRun run = run_in_place(base, draft.run);
  const StateArrays to = home_of(base, draft.to);
  Staging staging;
  LogBlock fresh;
  const std::int64_t begin = range.first * kLogNumel;
  const std::int64_t end = range.last * kLogNumel < run.numel ? range.last * kLogNumel : run.numel;
  const std::int64_t whole = steps_in_registers(run, draft.scalars) ? (end - begin) / kLogNumel * kLogNumel : 0;
  if (whole > 0) {
    const Block all = {&draft.run, begin, begin + whole};
    with_block_in_registers(draft.scalars, run, begin,
                            [&](const auto& at) { draft_blocks(at, to, run.moment_format, all, fresh); });
  }
  if (begin + whole < end) {
    const Block first = {&draft.run, begin + whole, end_of_block(run.numel, begin + whole)};
    const Block all = {&draft.run, begin + whole, end};
    draft_blocks(Staged{draft.scalars, run, first, staging}, to, run.moment_format, all, fresh);
  }
  end_streams();
}

}  // namespace
}  // namespace zero_opt
