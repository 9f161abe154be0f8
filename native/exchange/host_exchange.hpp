// Buckets between the ranks of one host, through memory that all of them map, a piece at a time.
//
// A piece is small enough for what one rank stages to be still in the cache when its peers read it, and the staging
// is two slots of one piece, however large the buckets are. Every rank goes through the same pieces of the same
// exchanges: stage into the free slot, publish, wait until every peer has published the same piece, read. A rank
// that stages piece n + 2, into the slot of n, has completed n + 1, for which every peer had to publish n + 1, which
// a peer does only after it has read n. So two slots need no further synchronization. An exchange that one rank
// skips is waited for to its end on all other ranks, which all read the same, before they give it up.
#pragma once

#include <cstdint>
#include <vector>

#include "exchange/peer_words.hpp"
#include "kernels/dispatch.hpp"

namespace zero_opt {

// Elements of a bucket that lie together in this rank's memory.
struct HostRun {
  std::int64_t start;  // in the bucket
  std::int64_t numel;
  char* data;  // null for zeros
  bool add;    // to what is in the shard, instead of overwriting it
};

// Elements of this rank's shard, and where the squares of every kSumNumel of them are added up.
struct HostSum {
  std::int64_t start;  // in the shard
  std::int64_t numel;
  double* squares;
};

// A bucket as this rank has it. Elements that no run covers are padding, which is not exchanged.
struct HostBucket {
  std::vector<HostRun> runs;         // ascending, apart from each other, alike on all ranks but for data and add
  std::vector<std::int64_t> bounds;  // rank r's shard is the elements from bounds[r] to bounds[r + 1]
  Format format;
  std::vector<HostSum> sums;  // ascending, apart from each other; this rank's own choice
};

// How far an exchange has come.
struct HostProgress {
  Staged state;            // kNotYet: call again with ``published``; kPassed: some peer skipped this exchange
  std::int32_t peer;       // who has not come yet
  std::int64_t published;  // pieces
};

class HostRanks {
 public:
  // arenas: by rank, where each rank's arena is mapped here: the peer words, and at data_at two slots.
  // divisor: of sums over the ranks; their number, for means, if it is 0.
  HostRanks(int rank, std::vector<char*> arenas, std::int64_t data_at, std::int64_t slot_bytes, int divisor = 0);

  // The mean over ranks of this rank's shard of a bucket into ``shard``, and its sums while it is in the cache, as
  // grad_sum takes them. Waits at most patience_s for a peer, then returns, to be called again.
  HostProgress reduce(const ExchangeIdent& ident, const HostBucket& bucket, char* shard, std::int64_t published,
                      double patience_s);

  // Every rank's shard of a bucket into this rank's runs.
  HostProgress gather(const ExchangeIdent& ident, const HostBucket& bucket, std::int64_t published, double patience_s);

 private:
  template <typename Stage, typename Read>
  HostProgress exchange(const ExchangeIdent& ident, std::int64_t pieces, std::int64_t published, double patience_s,
                        const Stage& stage, const Read& read);
  Staged wait_for_all(const ExchangeIdent& ident, std::int64_t piece, double patience_s, HostProgress& progress);
  char* slot(int rank, int number) const;
  int world_size() const { return static_cast<int>(arenas_.size()); }

  int rank_, divisor_;
  int slot_ = 0;  // the free one
  std::int64_t data_at_, slot_bytes_;
  std::vector<char*> arenas_, staged_;
};

}  // namespace zero_opt
