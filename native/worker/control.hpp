// The trainer's side of the control area: submit a step, wait for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "step/step.hpp"
#include "worker/control_block.hpp"
#include "worker/draft_queue.hpp"
#include "worker/logged_step.hpp"

namespace zero_opt {

enum class Waited { kDone, kDead, kWaiting };

// An arena as this process maps it. Descriptors are passed in with each call, since they change with the worker.
class Control {
 public:
  // Formats a control area of zeros; throws std::invalid_argument if it is formatted otherwise, or does not fit.
  Control(char* base, std::size_t bytes, std::size_t lanes, std::size_t max_runs);

  // Tells the worker to make the step, by the kernels of that name. All arrays must lie in the arena, behind the
  // control area, and no ``out`` over a gradient; throws std::invalid_argument, with nothing submitted, if they do not,
  // if there are too many runs, or if the last step is not finished. Returns the step's sequence number.
  // past_caches: what is written is not kept, where that can be, in caches that the worker shares with others, and the
  // step takes longer.
  std::uint64_t submit(const std::vector<UpdateBatch>& batches, int wake_fd, bool flush_denormals, bool past_caches,
                       const std::string& isa);

  // Has the worker make the runs from where they are read to where they are written, after the drafts before. Likewise
  // checked; no array that is written may overlap one that is read. Throws std::overflow_error if there is no room until
  // more drafts are done. Returns how many drafts have been submitted, ever. Two threads must not call it at once. Unlike that of
  // submit, the mode of the calling thread does not count.
  std::uint64_t draft(const std::vector<UpdateBatch>& batches, int wake_fd, bool flush_denormals, const std::string& isa);

  // Has the worker find ``squares`` of every array, which lie in the arena too, as a draft is made; grad_sum takes them.
  std::uint64_t draft_sums(const std::vector<GradArray>& grads, int wake_fd, bool flush_denormals, const std::string& isa);

  // No draft that was submitted is to be made; what it would have written is undefined.
  void void_drafts();

  // Until the step is done, the worker is dead (which its pidfd tells) or the time is over.
  Waited wait(std::uint64_t sequence, int done_fd, int worker_pidfd, double seconds);

  // Until so many drafts are done or void; likewise.
  Waited wait_drafts(std::uint64_t drafts, int done_fd, int worker_pidfd, double seconds);

  // Finishes the step and the drafts here, as the worker would.
  void finish(int threads) {
    finish_step(view_, bytes_, threads);
    finish_drafts(view_, bytes_, threads);
  }

  // Asks the worker to go once it has nothing to do.
  void stop(int wake_fd);

  std::uint64_t submitted() const { return control().submitted.load(std::memory_order_acquire); }
  std::uint64_t completed() const { return control().completed.load(std::memory_order_acquire); }
  std::uint64_t drafted() const { return control().drafted.load(std::memory_order_acquire); }
  std::uint64_t drafts_done() const { return control().drafts_done.load(std::memory_order_acquire); }
  std::uint64_t generation() const { return control().generation.load(std::memory_order_acquire); }
  std::uint64_t nonfinite() const { return control().nonfinite.load(std::memory_order_acquire); }
  double step_seconds() const { return 1e-9 * static_cast<double>(control().step_ns.load(std::memory_order_relaxed)); }
  std::string error() const;
  std::vector<std::uint64_t> progress() const;

 private:
  ControlBlock& control() const { return view_.control(); }
  std::uint64_t offset_of(const void* array, std::int64_t bytes) const;
  StepArrays offsets_of(const StateArrays& arrays, const UpdateRun& run) const;
  StepRun translated(const UpdateRun& run) const;
  std::uint64_t put(const std::vector<Draft>& drafts, int wake_fd, const StepHead& head);
  StepHead head(bool flush_denormals, const std::string& isa) const;
  Waited wait_for(const Word& word, std::uint64_t value, int done_fd, int worker_pidfd, double seconds);

  ArenaView view_;
  std::size_t bytes_, lanes_, max_runs_;
};

}  // namespace zero_opt
