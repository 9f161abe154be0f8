// What trainer and worker tell each other: the front of the arena that both map, each at an address of its own.
//
// Control block, table of the step in progress, one of drafts, and lanes with their redo logs.
// All places are offsets from the arena's start; 0, which is the control block's, stands for none. Each word has one
// writer: the trainer's are ``submitted`` and ``drafted`` with the tables under them, ``drafts_origin``, ``drafts_void``
// and ``stop``; the rest is the worker's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/draft.hpp"
#include "kernels/kernels.hpp"
#include "kernels/redo_log.hpp"

namespace zero_opt {

using Word = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8, "words that two processes share must need no lock");

constexpr std::uint64_t kControlMagic = 0x7a65726f5f6f7074;  // "zero_opt"
constexpr std::uint64_t kControlVersion = 5;
constexpr std::size_t kErrorBytes = 512, kIsaBytes = 16;

// A step as submitted; the runs and scalars follow in their tables.
struct StepHead {
  std::int64_t runs, blocks, numel;
  std::uint64_t arena_bytes;  // as the trainer maps it
  std::uint64_t flush_denormals;
  std::uint64_t past_caches;  // see LoggedStep
  char isa[kIsaBytes];
};

// At most so many blocks of a draft to a thread at a time: what a worker finishes before it sees that drafts are void.
constexpr std::int64_t kDraftBlocks = (1 << 20) / kLogNumel;

// A draft as submitted: some blocks, of kLogNumel elements, of a run or of a sum, one of which has no elements.
struct Draft {
  DraftRun run;
  DraftSum sum;
  BlockRange blocks;
  std::uint64_t arena_bytes;  // as the trainer maps it
  std::uint64_t flush_denormals;
  char isa[kIsaBytes];
};

struct alignas(64) ControlBlock {
  std::uint64_t magic, version, log_numel, lanes, max_runs, control_bytes;
  Word submitted, completed;  // sequence numbers of steps, from 1; alike when nothing is to be done
  Word drafted, drafts_done;  // numbers of drafts, from 0: of the next one submitted, of the next one to be made
  Word drafts_void;           // those before it are not to be made
  Word drafts_origin;         // of the draft in the first place of the table; it changes while there is none to be made
  Word stop;                  // nonzero asks the worker to go
  Word generation;            // raised by every worker when it is ready
  Word touched;               // bytes of the arena whose pages have been taken
  Word nonfinite;             // of the last completed step
  Word step_ns;               // how long it took who completed it
  Word error_bytes;           // of error, what a worker said before it gave up; 0 for nothing
  char error[kErrorBytes];
  StepHead step;
};

// Where the parts of a control area lie.
struct ControlLayout {
  std::size_t runs_at, scalars_at, drafts_at, lanes_at, bytes;

  ControlLayout(std::size_t lanes, std::size_t max_runs)
      : runs_at(sizeof(ControlBlock)),
        scalars_at(aligned(runs_at + max_runs * sizeof(StepRun), alignof(Lane))),
        drafts_at(aligned(scalars_at + max_runs * sizeof(StepScalars), kPage)),
        lanes_at(aligned(drafts_at + max_runs * sizeof(Draft), kPage)),
        bytes(aligned(lanes_at + lanes * sizeof(Lane), kPage)) {}

  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t aligned(std::size_t at, std::size_t unit) { return (at + unit - 1) / unit * unit; }
};

// A mapped arena by its parts.
class ArenaView {
 public:
  ArenaView(char* base, std::size_t lanes, std::size_t max_runs)
      : base_(base), lane_count_(lanes), layout_(lanes, max_runs) {}

  char* base() const { return base_; }
  std::size_t control_bytes() const { return layout_.bytes; }
  ControlBlock& control() const { return *reinterpret_cast<ControlBlock*>(base_); }
  StepRun* runs() const { return reinterpret_cast<StepRun*>(base_ + layout_.runs_at); }
  StepScalars* scalars() const { return reinterpret_cast<StepScalars*>(base_ + layout_.scalars_at); }
  Draft* drafts() const { return reinterpret_cast<Draft*>(base_ + layout_.drafts_at); }
  Lane* lanes() const { return reinterpret_cast<Lane*>(base_ + layout_.lanes_at); }
  std::int64_t lane_count() const { return static_cast<std::int64_t>(lane_count_); }

 private:
  char* base_;
  std::size_t lane_count_;
  ControlLayout layout_;
};

}  // namespace zero_opt
