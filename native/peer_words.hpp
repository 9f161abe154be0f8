// How ranks of one host tell each other, through shared memory, which part of which exchange their staging holds.
#pragma once

#include <atomic>
#include <cstdint>

namespace zero_opt {

// What a staging slot holds: a piece of an exchange.
struct SlotWords {
  std::atomic<std::uint64_t> ident;
  std::atomic<std::uint64_t> piece;  // written before a new ident, so that the pair is never half old
};

// At the start of every rank's arena; written by that rank alone, read by its peers.
struct PeerWords {
  SlotWords slots[2];
  std::atomic<std::uint32_t> bell;  // counts publications; what waiting peers sleep on
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "words that two processes share must need no lock");

enum class Staged { kSlot0 = 0, kSlot1 = 1, kPassed = 2, kNotYet = 3 };

// Announce that a slot now holds a piece of an exchange. Idents only grow, and pieces within one.
void publish(PeerWords& words, int slot, std::uint64_t ident, std::uint64_t piece);

// Where a peer holds a piece; kPassed if it has gone on to a later exchange without it; kNotYet after the timeout.
Staged wait_staged(const PeerWords& words, std::uint64_t ident, std::uint64_t piece, double timeout_s);

}  // namespace zero_opt
