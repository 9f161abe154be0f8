// Device memory: addresses that fault on the host, and a caching allocator with free lists per stream.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <array>

#include "streams.hpp"

namespace sim {
constexpr size_t kSpan = size_t(1) << 36;  // of addresses
constexpr int kPoison = 0xff;              // NaN in each floating-point type

inline char *device_base, *memory_base;
inline size_t used = 512;

inline void map_memory() {
  if (device_base) return;
  auto take = [](int protection) {
    void* at = mmap(nullptr, kSpan, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: no address space");
    return static_cast<char*>(at);
  };
  device_base = take(PROT_NONE), memory_base = take(PROT_READ | PROT_WRITE);
}
inline bool on_device(uintptr_t at) {
  auto base = reinterpret_cast<uintptr_t>(device_base);
  return at >= base && at < base + kSpan;
}
inline void* memory(const void* at) {  // where kernels see what the host knows as `at`
  return at == nullptr ? nullptr : memory_base + (static_cast<const char*>(at) - device_base);
}

struct Block {
  char* at;
  size_t size;
  int device;
  int64_t stream;
  uint64_t serial = 0;            // of the allocation that has it now, or had it last
  std::set<int64_t> others = {};  // streams that record_stream was called for
  Range range() const { return {reinterpret_cast<uintptr_t>(at), reinterpret_cast<uintptr_t>(at) + size}; }
  std::string text() const {
    return "allocation " + std::to_string(serial) + " (" + std::to_string(size) + " bytes)";
  }
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kType, c10::DeviceIndex(current_device));
    if (!bytes) return {nullptr, nullptr, &nothing, device};
    Locked lock(world());
    collect();
    Stream& stream = here(device);
    Block* block = take(stream, (bytes + 511) / 512 * 512);
    block->serial = ++serial_;
    count(block->device, int64_t(block->size));
    return {block->at, block, &free_one, device};
  }
  void use_on(const c10::DataPtr& data, int64_t stream) {
    auto* block = static_cast<Block*>(data.get_context());
    if (!block || data.get_deleter() != &free_one || stream == block->stream) return;
    Locked lock(world());
    block->others.insert(stream);
  }
  std::string describe(Range range) {  // under world()
    auto at = blocks_.upper_bound(range.begin);
    if (at == blocks_.begin()) return "host memory";
    const Block& block = *std::prev(at)->second;
    auto begin = range.begin - block.range().begin;
    return "bytes " + std::to_string(begin) + " to " + std::to_string(begin + range.end - range.begin) +
           " of " + block.text();
  }
  int64_t live() {
    Locked lock(world());
    return std::max<int64_t>(0, stats_[0].allocated_bytes[0].current) + stats_[1].allocated_bytes[0].current;
  }
  void forked() {  // under world(): what was to come from the parent's streams never comes
    for (auto& [block, marks] : waiting_) give_back(block);
    waiting_.clear(), suspects_.clear();
  }

  bool initialized() override { return enabled; }
  void emptyCache(c10::MempoolId_t) override {
    Locked lock(world());
    collect();
    for (auto& [key, blocks] : free_)
      for (Block* block : blocks) {
        stats_[block->device].reserved_bytes[0].decrease(block->size);
        madvise(memory(block->at), block->size, MADV_DONTNEED);
        blocks_.erase(block->range().begin);
        accesses().forget(block->range(), everything());
        delete block;
      }
    free_.clear();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { use_on(data, stream.id()); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked lock(world());
    return stats_[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Locked lock(world());
    stats_[device].allocated_bytes[0].reset_peak();
    stats_[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Locked lock(world());
    constexpr size_t kTotal = size_t(16) << 30;
    return {kTotal - stats_[device].reserved_bytes[0].current, kTotal};
  }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "sim: copy_data"); }

 private:
  struct Suspect {  // a free block that another stream may still use
    std::string block;
    Range range;
  };
  static void nothing(void*) {}
  static void free_one(void* block);
  static Clock everything() { return {std::vector<uint64_t>(agent_names().size(), UINT64_MAX)}; }

  Block* take(Stream& stream, size_t size) {
    // A new kernel may write to it at once, so to hand memory out counts as a write by the stream that it is
    // for.
    const std::string name = "the allocation";
    stream.clock.merge(host_clock());
    check_suspects(stream, size);
    auto& found = free_[{stream.device, stream.id, size}];
    if (found.empty()) {
      auto* block = new Block{device_base + used, size, stream.device, stream.id};
      used += size;
      blocks_[block->range().begin] = block;
      stats_[stream.device].reserved_bytes[0].increase(size);
      memset(memory(block->at), kPoison, size);
      stream.note(name, {{}, {block->range()}});
      return block;
    }
    Block* block = found.back();
    found.pop_back();
    stream.note(name, {{}, {block->range()}});
    stream.add([at = memory(block->at), size] { memset(at, kPoison, size); });
    return block;
  }
  void count(int device, int64_t bytes) {
    auto& stat = stats_[device].allocated_bytes[0];
    bytes > 0 ? stat.increase(bytes) : stat.decrease(-bytes);
  }
  void collect() {
    std::erase_if(waiting_, [&](auto& one) {
      auto& [block, marks] = one;
      if (!std::all_of(marks.begin(), marks.end(), [](auto& mark) { return mark->is_reached(); }))
        return false;
      for (auto& mark : marks) accesses().forget(block->range(), mark->clock);
      give_back(block);
      return true;
    });
  }
  void give_back(Block* block) {
    Stream& own = stream_of(block->device, block->stream);
    Clock known = own.clock;
    known.merge(host_clock());
    if (!accesses().unordered(block->range(), known).empty())
      suspects_[{block->device, block->stream}].push_back({block->text(), block->range()});
    block->others.clear();
    free_[{block->device, block->stream, block->size}].push_back(block);
  }
  void release(Block* block) {
    Locked lock(world());
    count(block->device, -int64_t(block->size));
    if (block->others.empty()) return give_back(block);
    std::vector<MarkPtr> marks;
    for (auto id : block->others) marks.push_back(stream_of(block->device, id).mark());
    waiting_.emplace_back(block, std::move(marks));
  }
  // An allocation may get any free block of its stream, whether or not this one does: the real allocator
  // splits them.
  void check_suspects(Stream& stream, size_t size) {
    auto found = suspects_.find({stream.device, stream.id});
    if (found == suspects_.end()) return;
    for (const Suspect& suspect : found->second) {
      auto users = accesses().unordered(suspect.range, stream.clock);
      for (const Access& user : users)
        report("race: " + suspect.block + " was freed while " + user.text() +
               " may still use it, and record_stream()"
               " was not called; the allocation of " +
               std::to_string(size) + " bytes on " + agent_names()[stream.agent] + " may get its memory");
      if (!users.empty()) accesses().forget(suspect.range, everything());
    }
    suspects_.erase(found);
  }

  std::map<std::tuple<int, int64_t, size_t>, std::vector<Block*>> free_;
  std::vector<std::pair<Block*, std::vector<MarkPtr>>> waiting_;  // for the streams that record_stream named
  std::map<std::pair<int, int64_t>, std::vector<Suspect>> suspects_;
  std::map<uintptr_t, Block*> blocks_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> stats_;
  uint64_t serial_ = 0;
};
inline Allocator& allocator() {
  static auto* one = new Allocator;
  return *one;
}
inline void Allocator::free_one(void* block) { allocator().release(static_cast<Block*>(block)); }
inline std::string describe(Range range) { return allocator().describe(range); }

}  // namespace sim
