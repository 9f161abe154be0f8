// What torch calls to work with devices, streams and events.
#pragma once
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "host_memory.hpp"
#include "memory.hpp"

namespace sim {

inline std::atomic<int> next_stream[kDevices] = {};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return {kType, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device to) const override {  // since CUDA 12, cudaSetDevice makes the context
    TORCH_CHECK(to.index() >= 0 && to.index() < kDevices, "sim: no such device: ", int(to.index()));
    if (to.index() != current_device) context[to.index()] = true;
    current_device = to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = to.index(); }
  static c10::Stream named(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return named(device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return named(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    if (!device.has_index()) device = getDevice();
    return named(device, 1 + next_stream[device.index()]++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return enabled ? kDevices : 0; }

  static Stream& of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }
  static MarkPtr mark_of(void* event) {  // another thread may record the event anew
    Locked lock(world());
    return event ? *static_cast<MarkPtr*>(event) : nullptr;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Locked lock(world());
    if (!*event) *event = new MarkPtr;
    *static_cast<MarkPtr*>(*event) = of(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Locked lock(world());
    of(stream).await(*static_cast<MarkPtr*>(event));
  }
  bool queryEvent(void* event) const override { return !event || host_asks(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) host_wait(mark_of(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    auto begin = mark_of(from), end = mark_of(to);
    TORCH_CHECK(begin && end && begin->is_reached() && end->is_reached(),
                "sim: both events must have completed");
    return std::chrono::duration<double, std::milli>(end->when - begin->when).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    MarkPtr mark;
    {
      Locked lock(world());
      mark = of(stream).mark();
    }
    // The mark is behind what is queued: a stream with nothing to do reaches it soon.
    for (int i = 0; i < 50 && !mark->is_reached(); i++)
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    return host_asks(mark);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream.device(), stream.id());
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().use_on(data, stream.id());  // autograd calls it
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    std::vector<MarkPtr> all;
    {
      Locked lock(world());
      for (auto& [key, stream] : streams())
        if (key.first == device) all.push_back(stream->mark());
    }
    for (auto& mark : all) host_wait(mark);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return enabled; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device < kDevices && context[device];
  }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    current_device = device;  // makes no context
    return before;
  }
  at::Device getDeviceFromPtr(void* data) const override { return allocator_device(data); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto* one = new at::Generator(at::detail::getDefaultCPUGenerator());
    return *one;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::one().has(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::one(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto device = storage.device();
    c10::DeviceGuard guard(device);
    auto fresh = allocator().allocate(bytes);
    size_t kept = std::min(bytes, storage.nbytes());
    if (kept) {
      auto range = [kept](const void* at) {
        return Range{reinterpret_cast<uintptr_t>(at), reinterpret_cast<uintptr_t>(at) + kept};
      };
      void *from = memory(storage.data()), *to = memory(fresh.get());
      Locked lock(world());
      here(device).launch("resize_", {{range(storage.data())}, {range(fresh.get())}},
                          [=] { memcpy(to, from, kept); });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }

 private:
  static at::Device allocator_device(void*) { return {kType, c10::DeviceIndex(current_device)}; }
};

}  // namespace sim
