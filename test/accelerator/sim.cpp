// A simulated accelerator on PrivateUse1: device memory that the host cannot touch, streams that are worker threads
// with random delays, a caching allocator with per-stream free lists that poisons what is freed, and a process group
// with NCCL's semantics over gloo. Everything that is not listed runs the CPU kernel, on the stream.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace sim {
using at::Tensor;
constexpr auto kType = c10::DeviceType::PrivateUse1;
std::atomic<bool> enabled{false};
constexpr int kDevices = 2, kStreams = 33;  // a default stream and a pool of 32, as CUDA has
constexpr size_t kSpan = size_t(1) << 38;   // of addresses

// -- memory ----------------------------------------------------------------------------------------------------------

char *device_base, *memory_base;
std::atomic<size_t> used{512};

void map() {
  if (device_base) return;
  auto take = [](int prot) {
    void* at = mmap(nullptr, kSpan, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: mmap");
    return static_cast<char*>(at);
  };
  device_base = take(PROT_NONE), memory_base = take(PROT_READ | PROT_WRITE);
}
bool on_device(const void* at) { return at >= device_base && at < device_base + kSpan; }
void* memory(const void* at) {  // where kernels see what the host knows as `at`
  return at == nullptr ? nullptr : memory_base + (static_cast<const char*>(at) - device_base);
}

// -- streams and events ----------------------------------------------------------------------------------------------

struct Mark {  // a point of a stream
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  void reach() {
    std::lock_guard lock(mutex);
    reached = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached; });
  }
  bool is_reached() {
    std::lock_guard lock(mutex);
    return reached;
  }
};
using MarkPtr = std::shared_ptr<Mark>;

std::atomic<int> delay_default{0}, delay_side{0}, delay_comm{0};  // microseconds at most, before each kernel
std::atomic<int> seed{0};
std::atomic<int64_t> launches{0};
std::atomic<bool> comm_fast_fail{false};

struct Stream {
  std::deque<std::function<void()>> queue;
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int>* delay;
  std::mt19937 random;
  explicit Stream(std::atomic<int>* delay, int number) : delay(delay), random(seed * 1000 + number) {
    std::thread([this] { run(); }).detach();
  }
  void run() {
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    at::set_num_threads(1);
    while (true) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return !queue.empty(); });
        next = std::move(queue.front());
        queue.pop_front();
      }
      try {
        next();
      } catch (const std::exception& error) {
        fprintf(stderr, "sim: a kernel failed: %s\n", error.what());
        _exit(70);
      }
    }
  }
  void add(std::function<void()> call) {
    std::lock_guard lock(mutex);
    queue.push_back(std::move(call));
    changed.notify_one();
  }
  void kernel(std::function<void()> call) {
    launches++;
    int most = delay->load();
    if (most) {
      int us;
      {
        std::lock_guard lock(mutex);
        us = random() % 3 ? 0 : random() % most;  // now and then
      }
      if (us) add([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
    }
    add(std::move(call));
  }
  MarkPtr mark() {
    auto found = std::make_shared<Mark>();
    add([found] { found->reach(); });
    return found;
  }
  void await(MarkPtr point) {
    add([point] { point->wait(); });
  }
  void synchronize() {
    pybind11::gil_scoped_release* release = PyGILState_Check() ? new pybind11::gil_scoped_release : nullptr;
    mark()->wait();
    delete release;
  }
};

thread_local int current_device = 0;
thread_local int64_t current_stream[kDevices] = {};
std::atomic<int> next_stream[kDevices] = {};
std::atomic<bool> context[kDevices] = {};

std::mutex streams_mutex;
auto* streams = new std::map<std::pair<int, int64_t>, Stream*>;

Stream& stream_of(int device, int64_t id) {
  std::lock_guard lock(streams_mutex);
  auto& found = (*streams)[{device, id}];
  context[device] = true;
  if (!found) found = new Stream(id ? &delay_side : &delay_default, int(device * 100 + id));
  return *found;
}
std::vector<Stream*>& comm_streams() {
  static auto* all = new std::vector<Stream*>;
  return *all;
}
Stream& here(c10::Device device) { return stream_of(device.index(), current_stream[device.index()]); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    current_device = to.index();
    return before;
  }
  c10::Device getDevice() const override { return {kType, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device to) const override {  // since CUDA 12 cudaSetDevice makes the context
    TORCH_CHECK(to.index() >= 0 && to.index() < kDevices, "sim: no such device");
    if (to.index() != current_device) context[to.index()] = true;
    current_device = to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = to.index(); }
  c10::Stream named(c10::Device device, int64_t id) const { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  c10::Stream getStream(c10::Device device) const override { return named(device, current_stream[device.index()]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return named(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return named(device, 1 + next_stream[device.index()]++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return enabled ? kDevices : 0; }
  static Stream& of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    *static_cast<MarkPtr*>(*event) = of(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) of(stream).await(*static_cast<MarkPtr*>(event));
  }
  bool queryEvent(void* event) const override { return !event || (*static_cast<MarkPtr*>(event))->is_reached(); }
  void synchronizeEvent(void* event) const override {
    if (event) (*static_cast<MarkPtr*>(event))->wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<MarkPtr*>(event); }
  bool queryStream(const c10::Stream& stream) const override { return of(stream).mark()->is_reached(); }
  void synchronizeStream(const c10::Stream& stream) const override { of(stream).synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;  // autograd calls it
  void synchronizeDevice(c10::DeviceIndex device) const override {
    std::vector<MarkPtr> all;
    {
      std::lock_guard lock(streams_mutex);
      for (auto& [key, stream] : *streams)
        if (key.first == device) all.push_back(stream->mark());
      for (auto* stream : comm_streams()) all.push_back(stream->mark());
    }
    for (auto& mark : all) mark->wait();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- the allocator ---------------------------------------------------------------------------------------------------

struct Block {
  char* at;
  size_t size;
  int device;
  int64_t stream;
  std::set<int64_t> others;  // streams that record_stream was called for
};
std::atomic<size_t> live_bytes{0};

struct Allocator final : c10::Allocator {
  std::mutex mutex;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<Block*>> free_blocks;
  std::vector<std::pair<Block*, std::vector<MarkPtr>>> waiting;

  c10::DataPtr allocate(size_t bytes) override {
    map();
    c10::Device device(kType, c10::DeviceIndex(current_device));
    if (!bytes) return {nullptr, nullptr, &nothing, device};
    size_t size = (bytes + 511) / 512 * 512;
    std::lock_guard lock(mutex);
    for (size_t i = 0; i < waiting.size();) {
      auto& [block, marks] = waiting[i];
      if (std::all_of(marks.begin(), marks.end(), [](auto& mark) { return mark->is_reached(); })) {
        give_back(block);
        waiting.erase(waiting.begin() + i);
      } else {
        i++;
      }
    }
    auto& found = free_blocks[{device.index(), current_stream[device.index()], size}];
    Block* block;
    if (found.empty()) {
      char* at = device_base + used.fetch_add(size);
      block = new Block{at, size, device.index(), current_stream[device.index()], {}};
      memset(memory(at), 0xff, size);
    } else {
      block = found.back();
      found.pop_back();
      void* at = memory(block->at);  // whoever has it now may write at once: NaN
      stream_of(block->device, block->stream).add([at, size] { memset(at, 0xff, size); });
    }
    live_bytes += size;
    return {block->at, block, &free_one, device};
  }
  void give_back(Block* block) {
    block->others.clear();
    free_blocks[{block->device, block->stream, block->size}].push_back(block);
  }
  void release(Block* block) {
    std::lock_guard lock(mutex);
    live_bytes -= block->size;
    if (block->others.empty()) return give_back(block);
    std::vector<MarkPtr> marks;
    for (auto id : block->others) marks.push_back(stream_of(block->device, id).mark());
    waiting.emplace_back(block, std::move(marks));
  }
  static void nothing(void*) {}
  static void free_one(void* context);
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "sim: copy_data"); }
};
Allocator& allocator() {
  static auto* one = new Allocator;
  return *one;
}
void Allocator::free_one(void* block) { allocator().release(static_cast<Block*>(block)); }

// -- kernels ---------------------------------------------------------------------------------------------------------

// The tensor as a CPU kernel sees it.
Tensor lowered(const Tensor& of) {
  if (!of.defined() || !of.device().is_privateuseone()) return of;
  return at::from_blob(memory(of.data_ptr()), of.sizes(), of.strides(), of.options().device(at::kCPU));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype_or_default(dtype));
}
Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_default(device));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype_or_default(dtype), format);
}

std::atomic<bool> pinned{true};  // whether copies from and to host memory overlap

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor from = lowered(self), to = lowered(dst);
  auto call = [from, to] { const_cast<Tensor&>(to).copy_(from); };  // host tensors live until then, as pinned ones do
  if (self.is_cpu() || dst.is_cpu()) {
    auto& stream = here(self.is_cpu() ? dst.device() : self.device());
    stream.kernel(call);
    if (!non_blocking || !pinned) stream.synchronize();
  } else {
    auto &source = here(self.device()), &target = here(dst.device());
    if (&source != &target) source.await(target.mark());
    source.kernel(call);
    if (&source != &target) target.await(source.mark());
  }
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}
at::Scalar local_scalar(const Tensor& self) {
  here(self.device()).synchronize();
  return lowered(self).item();
}
void use_on(const c10::DataPtr& data, const c10::Stream& stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (block && stream.id() != block->stream) {
    std::lock_guard lock(allocator().mutex);
    block->others.insert(stream.id());
  }
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const { use_on(data, stream); }
void record_stream(Tensor& self, c10::Stream stream) { use_on(self.storage().data_ptr(), stream); }

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  std::vector<c10::IValue> given(stack->end() - count, stack->end()), seen;
  std::optional<c10::Device> device;
  std::vector<Tensor> inputs;
  auto see = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.device().is_privateuseone()) {
      if (!device) device = tensor.device();
      TORCH_CHECK(*device == tensor.device(), "sim: ", schema.name(), ": tensors on two devices");
      inputs.push_back(tensor);
      return lowered(tensor);
    }
    TORCH_CHECK(tensor.dim() == 0, "sim: ", schema.name(), ": a tensor in host memory");
    return tensor.clone();
  };
  bool mutates = false, unsized = false;
  for (size_t i = 0; i < count; i++) {
    const auto& argument = schema.arguments()[i];
    unsized |= argument.kwarg_only() && writes(argument) && given[i].isTensor() && given[i].toTensor().numel() == 0;
  }
  if (unsized) {  // out=torch.empty(0): see what size it gets
    torch::jit::Stack trial;
    for (size_t i = 0; i < count; i++) {
      const auto& argument = schema.arguments()[i];
      if (argument.kwarg_only() && writes(argument) && given[i].isTensor())
        trial.emplace_back(at::empty({0}, given[i].toTensor().options().device(at::kCPU)));
      else if (given[i].isTensor()) trial.emplace_back(lowered(given[i].toTensor()));
      else if (given[i].isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : given[i].toTensorList()) list.push_back(lowered(tensor));
        trial.emplace_back(list);
      } else trial.push_back(given[i]);
    }
    op.callBoxed(trial);
    size_t number = 0;
    for (size_t i = 0; i < count; i++) {
      const auto& argument = schema.arguments()[i];
      if (argument.kwarg_only() && writes(argument) && given[i].isTensor())
        at::native::resize_(given[i].toTensor(), trial[number++].toTensor().sizes(), std::nullopt);
    }
  }
  for (size_t i = 0; i < count; i++) {
    const auto& value = given[i];
    mutates |= writes(schema.arguments()[i]);
    if (value.isTensor()) {
      seen.emplace_back(see(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorList()) list.push_back(see(tensor));
      seen.emplace_back(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(see(*tensor)) : std::nullopt);
      seen.emplace_back(list);
    } else if (value.isDevice()) {
      if (!device && value.toDevice().is_privateuseone()) device = value.toDevice();
      seen.emplace_back(c10::Device(at::kCPU));
    } else {
      seen.push_back(value);
    }
  }
  TORCH_CHECK(device, "sim: ", schema.name(), ": on no device");
  c10::DeviceGuard guard(*device);
  auto& stream = here(*device);
  torch::jit::drop(*stack, count);
  auto run = [op, seen] {
    torch::jit::Stack values(seen.begin(), seen.end());
    op.callBoxed(values);
    return values;
  };
  bool fresh = false, plain = false;
  for (const auto& result : schema.returns()) {
    bool tensors = result.type()->kind() == c10::TypeKind::TensorType || result.type()->kind() == c10::TypeKind::ListType;
    if (!tensors) plain = true;
    else if (!writes(result)) fresh = true;
  }
  auto mutated = [&](const c10::Argument& result) {
    for (size_t i = 0; i < count; i++) {
      const auto& argument = schema.arguments()[i];
      if (writes(argument) && argument.alias_info()->beforeSets() == result.alias_info()->beforeSets()) return given[i];
    }
    TORCH_CHECK(false, "sim: ", schema.name(), ": what is returned?");
  };
  if (!fresh && !plain) {
    stream.kernel([run] { run(); });
    for (const auto& result : schema.returns()) stack->push_back(mutated(result));
    return;
  }
  if (plain || mutates) stream.synchronize();  // the host waits
  torch::jit::Stack made;
  {
    at::NoGradGuard no_grad;
    made = run();  // else of whatever is there now, to see what shapes come out
  }
  std::vector<std::pair<size_t, Tensor>> places;  // of fresh tensors, in the order of the results
  auto place = [&](const Tensor& value) -> Tensor {
    if (!value.defined()) return value;
    for (const Tensor& input : inputs) {
      char *begin = static_cast<char*>(memory(input.storage().data_ptr().get())), *at = static_cast<char*>(value.data_ptr());
      if (begin && at >= begin && at < begin + input.storage().nbytes())  // a view
        return input.as_strided(value.sizes(), value.strides(), (at - begin) / value.element_size());
    }
    Tensor target = empty_strided(value.sizes(), value.strides(), value.scalar_type(), {}, device, {});
    places.emplace_back(0, target);
    return target;
  };
  std::vector<Tensor> targets;
  size_t number = 0;
  for (const auto& result : schema.returns()) {
    auto value = made[number++];
    if (result.alias_info() && writes(result)) {
      stack->push_back(mutated(result));
    } else if (value.isTensor()) {
      stack->emplace_back(place(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorList()) list.push_back(place(tensor));
      stack->emplace_back(list);
    } else {
      stack->push_back(value);
    }
  }
  if (places.empty()) return;
  std::vector<Tensor> to;
  for (auto& [_, tensor] : places) to.push_back(lowered(tensor));
  auto fill = [to](const torch::jit::Stack& values) {
    size_t at = 0;
    auto put = [&](const Tensor& value) {
      if (value.defined()) const_cast<Tensor&>(to[at++]).copy_(value);
    };
    for (const auto& value : values) {
      if (value.isTensor()) put(value.toTensor());
      else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorList()) put(tensor);
    }
  };
  if (mutates) {
    std::vector<c10::IValue> kept;
    for (size_t i = 0; i < made.size(); i++)
      if (!writes(schema.returns()[i])) kept.push_back(made[i]);
    fill(kept);
  } else {
    stream.kernel([run, fill] { fill(run()); });
  }
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}
Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, c10::Storage source) { return at::native::set_(self, source); }
Tensor& set_strided(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
Tensor view_as_real(const Tensor& self) {
  return at::native::view_as_real(self);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
}
// CUDA's tensors and the CPU's may take each other's data.
bool compatible(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& tensor) { return tensor.layout() == at::kStrided; };
  return dense(self) && dense(from);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", compatible); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return device < kDevices && context[device]; }
  c10::DeviceIndex deviceCount() const override { return enabled ? kDevices : 0; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator one = at::detail::getDefaultCPUGenerator();
    return one;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(at::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto device = storage.device();
    c10::DeviceGuard guard(device);
    auto fresh = allocator().allocate(bytes);
    void *from = memory(storage.data()), *to = memory(fresh.get());
    size_t kept = std::min(bytes, storage.nbytes());
    if (kept) here(device).kernel([=] { memcpy(to, from, kept); });
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// -- a process group as NCCL's ---------------------------------------------------------------------------------------

// Collectives run on a stream of their own, in the order of the calls; wait() makes the current stream wait.
struct CommWork final : c10d::Work {
  MarkPtr done;
  c10::Device device;
  std::vector<Tensor> held;  // as NCCL's until wait()
  CommWork(MarkPtr done, c10::Device device, std::vector<Tensor> held) : done(done), device(device), held(held) {}
  bool isCompleted() override { return done->is_reached(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    here(device).await(done);
    held.clear();
    return true;
  }
  void synchronize() override { here(device).await(done); }
};

struct Comm final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  Stream* stream;
  Comm(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo(gloo) {
    static std::atomic<int> number{500};
    stream = new Stream(&delay_comm, number++);
    std::lock_guard lock(streams_mutex);
    comm_streams().push_back(stream);
  }
  const std::string getBackendName() const override { return "simcomm"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  c10::intrusive_ptr<c10d::Work> enqueue(std::vector<Tensor> tensors, std::function<void()> call) {
    auto device = tensors[0].device();
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.device().is_privateuseone() && tensor.is_contiguous(), "simcomm: tensors must be contiguous, on the device");
      TORCH_CHECK(!tensor.is_complex(), "simcomm: dtype is not supported, as in NCCL");
    }
    stream->await(here(device).mark());
    stream->kernel(std::move(call));
    return c10::make_intrusive<CommWork>(stream->mark(), device, std::move(tensors));
  }
  static Tensor summed(c10d::Backend& gloo, const Tensor& in) {
    std::vector<Tensor> all{in.clone()};
    gloo.allreduce(all)->wait();
    return all[0];
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions&) override {
    return enqueue({out, in}, [gloo = gloo, to = lowered(out), from = lowered(in), rank = getRank()] {
      const_cast<Tensor&>(to).copy_(summed(*gloo, from).view(-1).narrow(0, rank * to.numel(), to.numel()).view(to.sizes()));
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions&) override {
    return enqueue({out, in}, [gloo = gloo, to = lowered(out), from = lowered(in), size = getSize()] {
      std::vector<std::vector<Tensor>> outs(1);
      for (int rank = 0; rank < size; rank++) outs[0].push_back(at::empty_like(from));
      std::vector<Tensor> ins{from.clone()};
      gloo->allgather(outs, ins)->wait();
      for (int rank = 0; rank < size; rank++) const_cast<Tensor&>(to).view(-1).narrow(0, rank * from.numel(), from.numel()).copy_(outs[0][rank].view(-1));
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins, const c10d::AllgatherOptions&) override {
    std::vector<Tensor> tensors = outs[0], to;
    tensors.insert(tensors.begin(), ins[0]);
    for (auto& out : outs[0]) to.push_back(lowered(out));
    return enqueue(tensors, [gloo = gloo, to, from = lowered(ins[0])] {
      std::vector<std::vector<Tensor>> outs{to};
      std::vector<Tensor> ins{from};
      gloo->allgather(outs, ins)->wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) override {
    return enqueue(tensors, [gloo = gloo, at = lowered(tensors[0]), mine = options.rootRank == getRank()] {
      Tensor sum = summed(*gloo, at);
      if (mine) const_cast<Tensor&>(at).copy_(sum);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions&) override {
    return enqueue(tensors, [gloo = gloo, at = lowered(tensors[0])] { const_cast<Tensor&>(at).copy_(summed(*gloo, at)); });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return enqueue(tensors, [gloo = gloo, at = lowered(tensors[0]), options] {
      std::vector<Tensor> all{at};
      gloo->broadcast(all, options)->wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<Tensor>& tensors, int to, int tag) override {
    return enqueue(tensors, [gloo = gloo, at = lowered(tensors[0]), to, tag] {
      std::vector<Tensor> all{at};
      gloo->send(all, to, tag)->wait();
    });
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<Tensor>& tensors, int from, int tag) override {
    return enqueue(tensors, [gloo = gloo, at = lowered(tensors[0]), from, tag] {
      std::vector<Tensor> all{at};
      gloo->recv(all, from, tag)->wait();
    });
  }
};
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  sim::map();
  c10::SetAllocator(sim::kType, &sim::allocator());
  m.def("enable", [] {
    sim::enabled = true;
    at::RegisterPrivateUse1HooksInterface(new sim::Hooks);
  });
  m.attr("device_type") = static_cast<int>(sim::kType);
  m.def("device_count", [] { return int(sim::Guard().deviceCount()); });
  m.def("exchange_device", [](int device) { return int(sim::Guard().exchangeDevice({sim::kType, c10::DeviceIndex(device)}).index()); });
  m.def("restore_device", [](int device) { sim::current_device = device; });
  py::class_<sim::Comm, c10::intrusive_ptr<sim::Comm>>(m, "Comm", py::module_::import("torch._C._distributed_c10d").attr("Backend"))
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>(), py::keep_alive<1, 2>());
  m.def("delays", [](int main, int side, int comm, int seed) {
    sim::delay_default = main, sim::delay_side = side, sim::delay_comm = comm, sim::seed = seed;
  });
  m.def("pinned", [](bool on) { sim::pinned = on; });
  m.def("launches", [] { return sim::launches.load(); });
  m.def("live_bytes", [] { return sim::live_bytes.load(); });
  m.def("contexts", [] { return std::vector<bool>(std::begin(sim::context), std::end(sim::context)); });
  m.def("synchronize", [] {
    py::gil_scoped_release release;
    for (int device = 0; device < sim::kDevices; device++)
      if (sim::context[device]) sim::Guard().synchronizeDevice(c10::DeviceIndex(device));
  });
  m.def("current_device", [] { return sim::current_device; });
  m.def("set_device", [](int device) { sim::Guard().setDevice({sim::kType, c10::DeviceIndex(device)}); });
}
