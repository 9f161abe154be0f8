#include "exchange/peer_words.hpp"

#include <chrono>
#include <climits>
#include <stdexcept>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace zero_opt {
namespace {

using Clock = std::chrono::steady_clock;

// A publication is usually either there already or far away: look again for this long, then sleep.
constexpr auto kSpin = std::chrono::microseconds(5);

#if defined(__linux__)
// Not the private kind: the sleepers are other processes.
void wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec timeout{static_cast<time_t>(seconds.count()), static_cast<long>((limit - seconds).count())};
  syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}
#else
void wake_all(std::atomic<std::uint32_t>&) {}
void sleep_on(const std::atomic<std::uint32_t>&, std::uint32_t, std::chrono::nanoseconds) {
  throw std::runtime_error("the shared-memory exchange needs Linux");
}
#endif

// Reads the words of a slot; false unless all are of one publication.
bool read(const SlotWords& slot, ExchangeIdent& ident, std::uint64_t& piece) {
  const std::uint64_t writes = slot.writes.load(std::memory_order_acquire);
  if (writes == 0 || writes % 2 != 0) return false;
  ident.step = slot.step.load(std::memory_order_acquire);
  ident.epoch = slot.epoch.load(std::memory_order_acquire);
  ident.sequence = slot.sequence.load(std::memory_order_acquire);
  piece = slot.piece.load(std::memory_order_acquire);
  return slot.writes.load(std::memory_order_relaxed) == writes;
}

// Words that are being written count as not there: the bell rings once they are complete.
Staged look(const PeerWords& words, const ExchangeIdent& ident, std::uint64_t piece) {
  // Between the reads of the two slots a peer may publish the piece in the first, and the next exchange in the second.
  // A rank that has seen a later exchange sees all that was published before it, so it reads the slots once more. They
  // do not change then, as the peer cannot complete that exchange without this rank.
  for (bool passed : {false, true}) {
    bool later = false;
    for (int slot = 0; slot < 2; ++slot) {
      ExchangeIdent found;
      std::uint64_t found_piece;
      if (!read(words.slots[slot], found, found_piece)) continue;
      if (found == ident && found_piece == piece) return static_cast<Staged>(slot);
      later |= found > ident;
    }
    if (passed) return Staged::kPassed;
    if (!later) break;
  }
  return Staged::kNotYet;
}

}  // namespace

void publish(PeerWords& words, int slot, const ExchangeIdent& ident, std::uint64_t piece) {
  SlotWords& to = words.slots[slot];
  const std::uint64_t writes = to.writes.load(std::memory_order_relaxed);
  // A rank that reads one of the new words then reads an odd number of writes, or the next even one.
  to.writes.store(writes + 1, std::memory_order_relaxed);
  to.step.store(ident.step, std::memory_order_release);
  to.epoch.store(ident.epoch, std::memory_order_release);
  to.sequence.store(ident.sequence, std::memory_order_release);
  to.piece.store(piece, std::memory_order_release);
  to.writes.store(writes + 2, std::memory_order_release);
  words.bell.fetch_add(1, std::memory_order_acq_rel);
  wake_all(words.bell);
}

Staged wait_staged(const PeerWords& words, const ExchangeIdent& ident, std::uint64_t piece, double timeout_s) {
  const auto start = Clock::now();
  const auto deadline = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  for (;;) {
    const std::uint32_t seen = words.bell.load(std::memory_order_acquire);
    const Staged found = look(words, ident, piece);
    if (found != Staged::kNotYet) return found;
    const auto now = Clock::now();
    if (now >= deadline) return found;
    if (now - start > kSpin) sleep_on(words.bell, seen, deadline - now);
  }
}

}  // namespace zero_opt
