// How ranks of one host tell each other, through shared memory, which part of which exchange their staging holds.
#pragma once

#include <atomic>
#include <cstdint>

namespace zero_opt {

// Names one exchange. Of two idents the later one is greater, on every rank. Each number has 64 bits, so that no run
// reaches its end.
struct ExchangeIdent {
  std::uint64_t step, epoch, sequence;
};

inline bool operator==(const ExchangeIdent& a, const ExchangeIdent& b) {
  return a.step == b.step && a.epoch == b.epoch && a.sequence == b.sequence;
}

inline bool operator>(const ExchangeIdent& a, const ExchangeIdent& b) {
  if (a.step != b.step) return a.step > b.step;
  return a.epoch != b.epoch ? a.epoch > b.epoch : a.sequence > b.sequence;
}

// What a staging slot holds: a piece of an exchange.
struct SlotWords {
  std::atomic<std::uint64_t> writes;  // odd while the words below are being written; 0 before they ever were
  std::atomic<std::uint64_t> step, epoch, sequence, piece;
};

// At the start of every rank's arena; written by that rank alone, read by its peers.
struct PeerWords {
  SlotWords slots[2];
  std::atomic<std::uint32_t> bell;  // counts publications, and may wrap; what waiting peers sleep on
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "words that two processes share must need no lock");

enum class Staged { kSlot0 = 0, kSlot1 = 1, kPassed = 2, kNotYet = 3 };

// Announce that a slot now holds a piece of an exchange. Idents only grow, and pieces within one.
void publish(PeerWords& words, int slot, const ExchangeIdent& ident, std::uint64_t piece);

// Where a peer holds a piece; kPassed if it has gone on to a later exchange without it; kNotYet after the timeout.
Staged wait_staged(const PeerWords& words, const ExchangeIdent& ident, std::uint64_t piece, double timeout_s);

}  // namespace zero_opt
