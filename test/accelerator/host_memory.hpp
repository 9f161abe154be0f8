// Host memory that copies from and to devices use: who may touch it when.
#pragma once
#include <ATen/record_function.h>

#include "memory.hpp"

namespace sim {

// Whether copies from and to host memory overlap with the host: of all memory, of none, or of page-locked
// memory.
enum class Pinned { kAll, kNone, kAllocated };
inline std::atomic<Pinned> pinned{Pinned::kAll};

class PinnedAllocator final : public c10::Allocator {  // of page-locked memory
 public:
  static PinnedAllocator& one() {
    static auto* it = new PinnedAllocator;
    return *it;
  }
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr plain = c10::GetAllocator(at::kCPU)->allocate(bytes);
    void* at = plain.get();
    if (at) {
      std::lock_guard lock(mutex_);
      ranges_[reinterpret_cast<uintptr_t>(at)] = bytes;
    }
    return {at, new c10::DataPtr(std::move(plain)), &free_one, at::kCPU};
  }
  bool has(const void* data) {
    auto address = reinterpret_cast<uintptr_t>(data);
    std::lock_guard lock(mutex_);
    auto at = ranges_.upper_bound(address);
    return at != ranges_.begin() && address < std::prev(at)->first + std::prev(at)->second;
  }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }

 private:
  static void free_one(void* data) {
    auto* plain = static_cast<c10::DataPtr*>(data);
    {
      std::lock_guard lock(one().mutex_);
      one().ranges_.erase(reinterpret_cast<uintptr_t>(plain->get()));
    }
    delete plain;
  }
  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

inline Range range_of(const Tensor& dense) {
  auto begin = reinterpret_cast<uintptr_t>(dense.const_data_ptr());
  return {begin, begin + dense.nbytes()};
}

// A copy that the host has not waited for. A copy to the host leaves NaN there when it is launched and shows
// what it copied once the host has waited for it. What a copy from the host reads must stay as it is until
// then.
struct HostCopy {
  const Tensor bytes;  // in the order of the host tensor: what is copied to it, or what it was at the launch
  const Range range;
  const bool to_host;
  Access access;
  bool reported = false;
  std::atomic<bool> ran{false};
  std::atomic<bool> settled{false};  // shown, or compared for the last time

  HostCopy(const Tensor& host, Tensor bytes, bool to_host)
      : bytes(std::move(bytes)),
        range(range_of(host)),
        to_host(to_host),
        kept_(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(host.storage().unsafeGetStorageImpl())),
        storage_(kept_) {}
  void show() {
    if (!settled.exchange(true)) memcpy(place(), bytes.const_data_ptr(), bytes.nbytes());
  }
  void poison() { memset(place(), kPoison, bytes.nbytes()); }
  void* place() const { return reinterpret_cast<void*>(range.begin); }
  bool changed() const { return memcmp(place(), bytes.const_data_ptr(), bytes.nbytes()) != 0; }
  // Whether the memory is still there. Then it stays so until this object, which must not die under world(),
  // is gone.
  bool keep() {
    if (!kept_) kept_ = storage_.lock();
    return bool(kept_);
  }
  bool unshared() const { return storage_.use_count() <= (kept_ ? 1u : 0u); }
  // The device has read it: the host's owners alone decide how long it lives, as they do with a real device.
  c10::intrusive_ptr<c10::StorageImpl> release() { return std::move(kept_); }

 private:
  c10::intrusive_ptr<c10::StorageImpl> kept_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
};
using HostCopyPtr = std::shared_ptr<HostCopy>;

// All such copies, in the order of their launches; under world().
class HostCopies {
 public:
  std::atomic<int> count{0};

  // Check a new copy against those under way, and remember it. Gives the copies to the host that it comes
  // after.
  std::vector<HostCopyPtr> add(const HostCopyPtr& copy, const Clock& clock,
                               std::vector<HostCopyPtr>& dropped) {
    std::vector<HostCopyPtr> sources;
    for (const HostCopyPtr& earlier : all_) {
      if (!earlier->range.overlaps(copy->range) || (!earlier->to_host && !copy->to_host)) continue;
      if (!earlier->access.before(clock)) {
        report("race: " + copy->access.text() + (copy->to_host ? " writes" : " reads") +
               " host memory that " + earlier->access.text() + (earlier->to_host ? " writes" : " reads") +
               ": nothing orders the two");
      } else if (earlier->to_host) {
        sources.push_back(earlier);
      } else {
        compare(*earlier,
                "before a copy to the same memory was launched");  // the host cannot change it from here on
        earlier->settled = true;
      }
    }
    if (all_.size() > 500) sweep(dropped);
    all_.push_back(copy);
    count = int(all_.size());
    return sources;
  }
  // Show and compare what the host now has waited for.
  void settle(const Clock& clock, std::vector<HostCopyPtr>& dropped) {
    std::erase_if(all_, [&](HostCopyPtr& copy) {
      if (!copy->access.before(clock)) return false;
      copy->to_host ? copy->show() : compare(*copy, "before the host had waited for it");
      dropped.push_back(std::move(copy));
      return true;
    });
    count = int(all_.size());
  }
  static void compare(HostCopy& copy, const char* when) {
    if (copy.settled || !copy.keep() || !copy.changed() || copy.settled.exchange(true)) return;
    report("race: the host memory that " + copy.access.text() + " reads has changed " + when);
  }
  void host_uses(Range range, bool writes, const std::string& what) {
    for (const HostCopyPtr& copy : all_)
      if ((writes || copy->to_host) && copy->range.overlaps(range) && !copy->reported) {
        copy->reported = true;        // operators are made of others
        if (!copy->keep()) continue;  // other memory that has its addresses
        report("race: " + what + " on the host " + (writes ? "writes" : "reads") + " memory that " +
               copy->access.text() + (copy->to_host ? " writes" : " reads") +
               ": the host has not waited for it");
        return;
      }
  }
  void forked(std::vector<HostCopyPtr>& dropped) { dropped.swap(all_), count = 0; }
  static HostCopies& one() {
    static auto* it = new HostCopies;
    return *it;
  }

 private:
  void sweep(std::vector<HostCopyPtr>& dropped) {  // of memory that nobody else has
    std::erase_if(all_, [&](HostCopyPtr& copy) {
      if (!copy->ran || !copy->unshared()) return false;
      dropped.push_back(std::move(copy));
      return true;
    });
  }
  std::vector<HostCopyPtr> all_;
};

inline void host_knows(const Clock& clock) {
  std::vector<HostCopyPtr> dropped;  // what dies here dies after the lock is released
  Locked lock(world());
  host_clock().merge(clock);
  if (HostCopies::one().count) HostCopies::one().settle(host_clock(), dropped);
}

// -- ATen's operators on host memory
// ---------------------------------------------------------------------------------

// Operators that look at a tensor's shape, type or storage, and never at what it holds.
inline bool looks_only(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::empty_like",   "aten::zeros_like",     "aten::ones_like",
      "aten::full_like",    "aten::rand_like",      "aten::randn_like",
      "aten::new_empty",    "aten::new_zeros",      "aten::new_ones",
      "aten::new_full",     "aten::set_",           "aten::new_empty_strided",
      "aten::is_pinned",    "aten::record_stream",  "aten::result_type",
      "aten::is_same_size", "aten::can_cast",       "aten::_has_compatible_shallow_copy_type",
      "aten::set_data",     "aten::requires_grad_", "aten::retain_grad",
      "aten::_version",     "aten::resize_",        "aten::is_set_to"};
  return names->count(name) != 0;
}

inline bool of_simulation(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().is_privateuseone();
  if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector())
      if (tensor.defined() && tensor.is_privateuseone()) return true;
    return false;
  }
  return value.isDevice() && value.toDevice().is_privateuseone();
}

inline void check_host_tensor(const Tensor& tensor, bool writes, const char* name) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage() || !tensor.numel()) return;
  auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  uintptr_t size =
      tensor.is_contiguous() ? tensor.nbytes() : tensor.element_size();  // of others, the first element
  Locked lock(world());
  HostCopies::one().host_uses({begin, begin + size}, writes, name);
}

inline std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& function) {
  if (quiet || !HostCopies::one().count || looks_only(function.name())) return nullptr;
  auto inputs = function.inputs();
  for (const c10::IValue& input : inputs)
    if (of_simulation(input)) return nullptr;  // its kernel knows what it uses
  auto schema = function.operator_schema();
  if (!schema) return nullptr;
  Quiet no_recursion;
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); i++) {
    const auto* alias = schema->arguments()[i].alias_info();
    bool writes = alias && alias->isWrite();
    if (alias && !writes) continue;  // a view
    if (inputs[i].isTensor())
      check_host_tensor(inputs[i].toTensor(), writes, function.name());
    else if (inputs[i].isTensorList())
      for (const Tensor& tensor : inputs[i].toTensorVector())
        check_host_tensor(tensor, writes, function.name());
  }
  return nullptr;
}

inline void observe_host() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(observe).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace sim
