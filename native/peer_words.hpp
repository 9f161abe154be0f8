// How ranks of one host tell each other, through shared memory, which exchange their staging holds.
#pragma once

#include <atomic>
#include <cstdint>

namespace zero_opt {

// At the start of every rank's arena; written by that rank alone, read by its peers.
struct PeerWords {
  std::atomic<std::uint64_t> staged[2];  // per staging slot, the ident of the exchange it holds
  std::atomic<std::uint32_t> bell;       // counts publications; what waiting peers sleep on
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "words that two processes share must need no lock");

enum class Staged { kSlot0 = 0, kSlot1 = 1, kPassed = 2, kNotYet = 3 };

// Announce that a slot now holds an exchange. Idents only grow.
void publish(PeerWords& words, int slot, std::uint64_t ident);

// Where a peer holds an exchange; kPassed if it has gone on to a later one without it; kNotYet after the timeout.
Staged wait_staged(const PeerWords& words, std::uint64_t ident, double timeout_s);

}  // namespace zero_opt
