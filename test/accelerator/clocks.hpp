// Vector clocks, memory accesses, and the check that whoever shares memory is ordered.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

namespace sim {

// Guards clocks, accesses, streams and the allocator: the order of launches is the order of the clocks'
// ticks. Nothing that may need the interpreter's lock is destroyed under it.
inline std::mutex& world() {
  static auto* one = new std::mutex;
  return *one;
}
using Locked = std::lock_guard<std::mutex>;

// How many launches of each agent, a stream, are known to come before.
struct Clock {
  std::vector<uint64_t> ticks;
  void merge(const Clock& other) {
    if (ticks.size() < other.ticks.size()) ticks.resize(other.ticks.size());
    for (size_t agent = 0; agent < other.ticks.size(); agent++)
      if (ticks[agent] < other.ticks[agent]) ticks[agent] = other.ticks[agent];
  }
  uint64_t tick(int agent) {
    if (ticks.size() <= size_t(agent)) ticks.resize(agent + 1);
    return ++ticks[agent];
  }
  bool covers(int agent, uint64_t tick) const { return size_t(agent) < ticks.size() && ticks[agent] >= tick; }
};

inline Clock& host_clock() {  // of all that any host thread has waited for
  static auto* one = new Clock;
  return *one;
}
inline std::vector<std::string>& agent_names() {
  static auto* all = new std::vector<std::string>;
  return *all;
}
inline int new_agent(std::string name) {
  agent_names().push_back(std::move(name));
  return int(agent_names().size()) - 1;
}
inline const std::string* interned(const std::string& name) {  // kept for good; any thread, under world()
  static auto* names = new std::unordered_set<std::string>;
  return &*names->insert(name).first;
}

struct Access {
  int agent = -1;
  uint64_t tick = 0;
  const std::string* kernel = nullptr;
  bool before(const Clock& clock) const { return agent < 0 || clock.covers(agent, tick); }
  std::string text() const {
    return *kernel + " on " + agent_names()[agent] + " (its launch " + std::to_string(tick) + ")";
  }
};

struct Range {  // of addresses
  uintptr_t begin, end;
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};
std::string describe(Range range);

struct Uses {  // what a kernel reads, and what it writes
  std::vector<Range> reads, writes;
};

inline std::vector<std::string>& race_reports() {
  static auto* all = new std::vector<std::string>;
  return *all;
}
inline void report(std::string text) {
  constexpr size_t kMost = 1000;
  if (race_reports().size() < kMost) race_reports().push_back(std::move(text));
}

// The last writer of every byte of device memory, and its readers since.
class Accesses {
 public:
  // Check a kernel against what came before it, then remember it. `clock` has what is ordered before the
  // kernel.
  void add(const Access& access, const Uses& uses, const Clock& clock) {
    reported_.clear();
    for (const Range& range : uses.reads) read(range, access, clock);
    for (const Range& range : uses.writes) write(range, access, clock);
  }
  // The accesses to a range that `clock` does not order.
  std::vector<Access> unordered(Range range, const Clock& clock) {
    std::vector<Access> found;
    for (auto at = first(range); at != spans_.end() && at->first < range.end; ++at) {
      if (!at->second.writer.before(clock)) found.push_back(at->second.writer);
      for (const Access& reader : at->second.readers)
        if (!reader.before(clock)) found.push_back(reader);
    }
    return found;
  }
  // Forget the accesses to a range that `clock` orders.
  void forget(Range range, const Clock& clock) {
    for (auto at = first(range); at != spans_.end() && at->first < range.end;) {
      Span& span = at->second;
      if (span.writer.before(clock)) span.writer = {};
      std::erase_if(span.readers, [&](const Access& reader) { return reader.before(clock); });
      at = span.writer.agent < 0 && span.readers.empty() ? spans_.erase(at) : std::next(at);
    }
  }
  void clear() { spans_.clear(); }

 private:
  struct Span {
    uintptr_t end;
    Access writer;
    std::vector<Access> readers;  // one of each agent at most
  };
  using Spans = std::map<uintptr_t, Span>;

  Spans::iterator first(Range range) {  // the first span that overlaps
    auto at = spans_.upper_bound(range.begin);
    if (at != spans_.begin() && std::prev(at)->second.end > range.begin) --at;
    return at;
  }
  void cut(uintptr_t place) {  // so that no span has `place` inside it
    auto at = spans_.lower_bound(place);
    if (at == spans_.begin()) return;
    Span& span = (--at)->second;
    if (span.end <= place) return;
    Span rest = span;
    span.end = place;
    spans_.emplace(place, std::move(rest));
  }
  void check(const Access& earlier, const char* did, const Access& access, const char* does, Range range,
             const Clock& clock) {
    if (earlier.before(clock) || !reported_.emplace(earlier.agent, earlier.tick).second) return;
    report("race: " + access.text() + " " + does + " " + describe(range) + ", which " + earlier.text() + " " +
           did + ": nothing orders the two");
  }
  void read(Range range, const Access& access, const Clock& clock) {
    cut(range.begin), cut(range.end);
    auto at = spans_.lower_bound(range.begin);
    for (uintptr_t place = range.begin; place < range.end; ++at) {
      if (at == spans_.end() || at->first > place) {
        uintptr_t end = at == spans_.end() ? range.end : std::min(range.end, at->first);
        at = spans_.emplace_hint(at, place, Span{end, {}, {}});
      }
      Span& span = at->second;
      check(span.writer, "writes", access, "reads", {place, span.end}, clock);
      std::erase_if(span.readers, [&](const Access& reader) { return reader.agent == access.agent; });
      span.readers.push_back(access);
      place = span.end;
    }
  }
  void write(Range range, const Access& access, const Clock& clock) {
    cut(range.begin), cut(range.end);
    auto at = spans_.lower_bound(range.begin);
    while (at != spans_.end() && at->first < range.end) {
      Range part{at->first, at->second.end};
      if (at->second.writer.agent != access.agent || at->second.writer.tick != access.tick)
        check(at->second.writer, "writes", access, "writes", part, clock);
      for (const Access& reader : at->second.readers)
        if (reader.agent != access.agent) check(reader, "reads", access, "writes", part, clock);
      at = spans_.erase(at);
    }
    spans_.emplace(range.begin, Span{range.end, access, {}});
  }

  Spans spans_;
  std::set<std::pair<int, uint64_t>> reported_;  // of the kernel at hand
};
inline Accesses& accesses() {
  static auto* one = new Accesses;
  return *one;
}

}  // namespace sim
