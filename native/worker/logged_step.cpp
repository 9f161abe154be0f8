#include "worker/logged_step.hpp"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>

#include "kernels/dispatch.hpp"
#include "threads/flush_denormals.hpp"
#include "threads/thread_pool.hpp"

namespace zero_opt {

BlockRange blocks_of_lane(std::int64_t blocks, std::int64_t lane, std::int64_t lanes) {
  return {blocks * lane / lanes, blocks * (lane + 1) / lanes};
}

void finish_step(const ArenaView& arena, std::size_t mapped_bytes, int threads) {
  ControlBlock& control = arena.control();
  const std::uint64_t sequence = control.submitted.load(std::memory_order_acquire);
  if (control.completed.load(std::memory_order_acquire) == sequence) return;
  const auto begin = std::chrono::steady_clock::now();
  const StepHead& head = control.step;
  if (head.arena_bytes > mapped_bytes) throw std::runtime_error("the arena has grown since this worker was started");
  const LoggedStep step = {arena.base(), arena.runs(), arena.scalars(), sequence, head.past_caches != 0};
  const Kernels& kernels = kernels_named(std::string(head.isa));
  std::atomic<std::int64_t> nonfinite{0};
  const std::int64_t lanes = arena.lane_count();
  const auto work = [&](std::int64_t lane) {
    const FlushDenormals mode(head.flush_denormals != 0);
    nonfinite += kernels.run_lane(step, blocks_of_lane(head.blocks, lane, lanes), arena.lanes()[lane]);
  };
  share_out(lanes, head.numel > kAloneNumel ? threads : 1, work);
  const auto took = std::chrono::steady_clock::now() - begin;
  control.step_ns.store(static_cast<std::uint64_t>(std::chrono::nanoseconds(took).count()), std::memory_order_relaxed);
  control.nonfinite.store(static_cast<std::uint64_t>(nonfinite.load()), std::memory_order_relaxed);
  control.completed.store(sequence, std::memory_order_release);
}

}  // namespace zero_opt
