#include "exchange/host_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace zero_opt {
namespace {

constexpr std::int64_t kZeroBytes = 4096;
alignas(64) const char kZeros[kZeroBytes] = {};

struct Range {
  std::int64_t low, high;
};

// The elements of rank's shard that piece number ``piece`` of ``step`` elements covers.
Range piece_of(const HostBucket& bucket, int rank, std::int64_t piece, std::int64_t step) {
  const std::int64_t end = bucket.bounds[rank + 1];
  const std::int64_t low = std::min(bucket.bounds[rank] + piece * step, end);
  return {low, std::min(low + step, end)};
}

std::int64_t piece_count(const HostBucket& bucket, std::int64_t step) {
  std::int64_t largest = 0;
  for (std::size_t rank = 1; rank < bucket.bounds.size(); ++rank) {
    largest = std::max(largest, bucket.bounds[rank] - bucket.bounds[rank - 1]);
  }
  return std::max<std::int64_t>(1, (largest + step - 1) / step);  // even an empty exchange is one to agree on
}

// Calls each(run, low, high) for what every run has of a range of elements.
template <typename Each>
void for_runs(const HostBucket& bucket, Range range, const Each& each) {
  const auto ends_before = [](const HostRun& run, std::int64_t low) { return run.start + run.numel <= low; };
  auto run = std::lower_bound(bucket.runs.begin(), bucket.runs.end(), range.low, ends_before);
  for (; run != bucket.runs.end() && run->start < range.high; ++run) {
    const std::int64_t low = std::max(range.low, run->start), high = std::min(range.high, run->start + run->numel);
    if (low < high) each(*run, low, high);
  }
}

void copy_out(const HostBucket& bucket, Range range, std::int64_t item, char* to) {
  for_runs(bucket, range, [&](const HostRun& run, std::int64_t low, std::int64_t high) {
    char* target = to + (low - range.low) * item;
    const std::size_t bytes = static_cast<std::size_t>((high - low) * item);
    run.data == nullptr ? std::memset(target, 0, bytes) : std::memcpy(target, run.data + (low - run.start) * item, bytes);
  });
}

void copy_in(const HostBucket& bucket, Range range, std::int64_t item, const char* from) {
  for_runs(bucket, range, [&](const HostRun& run, std::int64_t low, std::int64_t high) {
    std::memcpy(run.data + (low - run.start) * item, from + (low - range.low) * item,
                static_cast<std::size_t>((high - low) * item));
  });
}

// Adds up what lies in the shard from ``begin`` on and is in place up to ``end``: the sums whose last element is
// between the two.
void add_up(const HostBucket& bucket, const char* shard, std::int64_t begin, std::int64_t end) {
  const auto ends_before = [](const HostSum& sum, std::int64_t low) { return sum.start + sum.numel <= low; };
  auto sum = std::lower_bound(bucket.sums.begin(), bucket.sums.end(), begin, ends_before);
  for (; sum != bucket.sums.end() && sum->start < end; ++sum) {
    const std::int64_t first = std::max<std::int64_t>(begin - sum->start, 0) / kSumNumel * kSumNumel;
    for (std::int64_t at = first; at < sum->numel; at += kSumNumel) {
      const std::int64_t n = std::min(kSumNumel, sum->numel - at);
      if (sum->start + at + n > end) return;
      const char* values = shard + (sum->start + at) * bytes_of(bucket.format);
      sum->squares[at / kSumNumel] = chosen_kernels().grad_sum(values, bucket.format, n).squares;
    }
  }
}

}  // namespace

HostRanks::HostRanks(int rank, std::vector<char*> arenas, std::int64_t data_at, std::int64_t slot_bytes,
                     int divisor)
    : rank_(rank), divisor_(divisor == 0 ? static_cast<int>(arenas.size()) : divisor), data_at_(data_at), slot_bytes_(slot_bytes), arenas_(std::move(arenas)), staged_(arenas_.size()) {
  if (rank < 0 || rank >= world_size() || world_size() < 2) throw std::invalid_argument("no such rank");
}

char* HostRanks::slot(int rank, int number) const { return arenas_[rank] + data_at_ + number * slot_bytes_; }

Staged HostRanks::wait_for_all(const ExchangeIdent& ident, std::int64_t piece, double patience_s,
                               HostProgress& progress) {
  Staged all = Staged::kSlot0;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == rank_) continue;
    const PeerWords& words = *reinterpret_cast<const PeerWords*>(arenas_[rank]);
    const Staged found = wait_staged(words, ident, static_cast<std::uint64_t>(piece), patience_s);
    if (found == Staged::kNotYet) {
      progress.peer = rank;
      return found;
    }
    if (found == Staged::kPassed) {
      all = found;
    } else {
      staged_[rank] = slot(rank, static_cast<int>(found));
    }
  }
  return all;
}

template <typename Stage, typename Read>
HostProgress HostRanks::exchange(const ExchangeIdent& ident, std::int64_t pieces, std::int64_t published,
                                 double patience_s, const Stage& stage, const Read& read) {
  PeerWords& own = *reinterpret_cast<PeerWords*>(arenas_[rank_]);
  HostProgress progress = {Staged::kSlot0, rank_, published};
  for (std::int64_t piece = std::max<std::int64_t>(published - 1, 0); piece < pieces; ++piece) {
    if (piece == progress.published) {
      stage(piece, slot(rank_, slot_));
      publish(own, slot_, ident, static_cast<std::uint64_t>(piece));
      slot_ ^= 1;
      ++progress.published;
    }
    progress.state = wait_for_all(ident, piece, patience_s, progress);
    if (progress.state != Staged::kSlot0) return progress;
    read(piece);
  }
  return progress;
}

HostProgress HostRanks::reduce(const ExchangeIdent& ident, const HostBucket& bucket, char* shard,
                               std::int64_t published, double patience_s) {
  const std::int64_t item = bytes_of(bucket.format);
  // Whole cache lines for each peer; a slot is far larger than its peers' lines.
  const std::int64_t step = std::max<std::int64_t>(slot_bytes_ / (world_size() - 1) / 64 * 64 / item, 64 / item);
  // Every peer's part lies where it expects it: this rank's own part is not among them.
  const auto place = [&](int of, int reader) { return (reader < of ? reader : reader - 1) * step * item; };
  const auto stage = [&](std::int64_t piece, char* to) {
    for (int reader = 0; reader < world_size(); ++reader) {
      if (reader != rank_) copy_out(bucket, piece_of(bucket, reader, piece, step), item, to + place(rank_, reader));
    }
  };
  const Kernels& kernels = chosen_kernels();
  std::vector<const void*> sources(arenas_.size());
  const auto read = [&](std::int64_t piece) {
    const Range range = piece_of(bucket, rank_, piece, step);
    for_runs(bucket, range, [&](const HostRun& run, std::int64_t low, std::int64_t high) {
      const std::int64_t most = run.data == nullptr ? kZeroBytes / item : high - low;
      for (std::int64_t from = low; from < high; from += most) {
        for (int rank = 0; rank < world_size(); ++rank) {
          if (rank != rank_) sources[rank] = staged_[rank] + place(rank, rank_) + (from - range.low) * item;
        }
        sources[rank_] = run.data == nullptr ? kZeros : run.data + (from - run.start) * item;
        kernels.mean({std::min(most, high - from), world_size(), divisor_, bucket.format, run.add, sources.data(),
                      shard + (from - bucket.bounds[rank_]) * item});
      }
    });
    add_up(bucket, shard, range.low - bucket.bounds[rank_], range.high - bucket.bounds[rank_]);
  };
  return exchange(ident, piece_count(bucket, step), published, patience_s, stage, read);
}

HostProgress HostRanks::gather(const ExchangeIdent& ident, const HostBucket& bucket, std::int64_t published,
                               double patience_s) {
  const std::int64_t item = bytes_of(bucket.format), step = slot_bytes_ / item;
  const auto stage = [&](std::int64_t piece, char* to) { copy_out(bucket, piece_of(bucket, rank_, piece, step), item, to); };
  const auto read = [&](std::int64_t piece) {
    for (int rank = 0; rank < world_size(); ++rank) {
      if (rank != rank_) copy_in(bucket, piece_of(bucket, rank, piece, step), item, staged_[rank]);
    }
  };
  return exchange(ident, piece_count(bucket, step), published, patience_s, stage, read);
}

}  // namespace zero_opt
