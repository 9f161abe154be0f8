// The kernel of draft.hpp: included once by each isa_*.cpp, after redo_log.inl.
#pragma once

#include "draft.hpp"
#include "redo_log.inl"

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
  const char* from = static_cast<const char*>(fresh);
  for (std::int64_t at = 0; at < n * width; at += kLine) stream_line(from + at, to + at);
}

void stream_block(const AdamArrays& to, Format moments, const Block& block, const LogBlock& fresh) {
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

void run_draft(char* base, const DraftRun& draft, const BlockRange& range) {
  AdamRun run = run_in_place(base, draft.run);
  const AdamArrays to = home_of(base, draft.to);
  const StepBlock step_block = goes_straight(run, draft.scalars) ? step_straight : step_staged;
  Staging staging;
  LogBlock fresh;
  for (std::int64_t number = range.first; number < range.last; ++number) {
    const std::int64_t begin = number * kLogNumel, left = run.numel - begin;
    const Block block = {&draft.run, begin, left < kLogNumel ? run.numel : begin + kLogNumel};
    step_block(draft.scalars, run, block, fresh, staging);
    stream_block(to, run.moment_format, block, fresh);
  }
  end_streams();
}

}  // namespace
}  // namespace zero_opt
