// Operators: each runs its CPU kernel, on the current stream of its tensors' device.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "guard.hpp"

namespace sim {

// The tensor as a CPU kernel sees it.
inline Tensor lowered(const Tensor& of) {
  if (!of.defined() || !of.is_privateuseone()) return of;
  Tensor seen =
      at::from_blob(memory(of.data_ptr()), of.sizes(), of.strides(), of.options().device(at::kCPU));
  if (of.is_conj()) seen._set_conj(true);
  if (of.is_neg()) seen._set_neg(true);
  return seen;
}

// The bytes of a tensor: its rows, where it is not dense.
inline void add_ranges(const Tensor& tensor, std::vector<Range>& to) {
  if (!tensor.defined() || !tensor.numel() || !tensor.is_privateuseone()) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size, the closest first
  for (int64_t i = 0; i < tensor.dim(); i++)
    if (tensor.size(i) > 1 && tensor.stride(i)) dims.emplace_back(tensor.stride(i), tensor.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t row = 1;
  size_t outer = 0;
  while (outer < dims.size() && dims[outer].first <= row)
    row += dims[outer].first * (dims[outer].second - 1), outer++;
  int64_t rows = 1;
  for (size_t i = outer; i < dims.size(); i++) rows *= dims[i].second;
  constexpr int64_t kMost = 1 << 14;
  if (rows > kMost) return;  // too many to look at: such a tensor is not checked
  auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  for (int64_t number = 0; number < rows; number++) {
    int64_t at = 0, rest = number;
    for (size_t i = outer; i < dims.size(); i++)
      at += rest % dims[i].second * dims[i].first, rest /= dims[i].second;
    uintptr_t from = begin + at * tensor.element_size();
    to.push_back({from, from + row * tensor.element_size()});
  }
}

inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                            std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

inline bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// One call of an operator that has no kernel of its own here.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        given_(stack->end() - schema_.arguments().size(), stack->end()) {}

  void run() {
    find_device();
    c10::DeviceGuard guard(*device_);
    Quiet quiet;
    for (const auto& result : schema_.returns()) {
      bool tensors = result.type()->kind() == c10::TypeKind::TensorType ||
                     result.type()->kind() == c10::TypeKind::ListType;
      plain_ |= !tensors, fresh_ |= tensors && !writes(result);
    }
    take_generator();
    size_outputs();
    if (plain_ || !foretell()) return run_now();
    auto uses = uses_of(given_);
    auto values = lowered_all(given_);
    std::vector<Tensor> to = place_results(results_, true);
    for (const Tensor& tensor : fresh_results_) add_ranges(tensor, uses.writes);
    if (only_views_) return;
    if (generator_copy_) values[*generator_] = *generator_copy_;
    launch(uses, [op = op_, values, to] { fill(to, called(op, values), op.schema()); });
  }

 private:
  using Values = std::vector<c10::IValue>;

  static Values called(const c10::OperatorHandle& op, const Values& values) {
    torch::jit::Stack stack(values.begin(), values.end());
    op.callBoxed(stack);
    return stack;
  }
  void launch(const Uses& uses, std::function<void()> call) {
    Locked lock(world());
    here(*device_).launch(schema_.name(), uses, std::move(call));
  }
  template <typename F>
  static void each_tensor(const c10::IValue& value, const F& call) {
    if (value.isTensor())
      call(value.toTensor());
    else if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector()) call(tensor);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        if (tensor) call(*tensor);
  }
  template <typename F>
  static c10::IValue mapped(const c10::IValue& value, const F& call) {
    if (value.isTensor()) return call(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(call(*tensor)) : std::nullopt);
      return list;
    }
    if (value.isDevice()) return c10::Device(at::kCPU);
    return value;
  }
  void find_device() {
    for (const c10::IValue& value : given_) {
      each_tensor(value, [&](const Tensor& tensor) {
        if (!tensor.defined()) return;
        if (!tensor.is_privateuseone()) {
          TORCH_CHECK(tensor.dim() == 0, "Expected all tensors to be on the same device, but ",
                      schema_.name(), " got one of ", tensor.device());
          return;
        }
        if (!device_) device_ = tensor.device();
        TORCH_CHECK(*device_ == tensor.device(), "Expected all tensors to be on the same device, but ",
                    schema_.name(), " got some of ", *device_, " and of ", tensor.device());
      });
      if (value.isDevice() && value.toDevice().is_privateuseone() && !device_)
        device_ = c10::device_or_default(value.toDevice());
    }
    TORCH_CHECK(device_, "sim: ", schema_.name(), " on no device");
    if (!device_->has_index()) device_ = Guard().getDevice();
  }
  Uses uses_of(const Values& values) const {
    Uses uses;
    for (size_t i = 0; i < values.size(); i++)
      each_tensor(values[i], [&](const Tensor& tensor) {
        add_ranges(tensor, writes(schema_.arguments()[i]) ? uses.writes : uses.reads);
      });
    return uses;
  }
  static Tensor number(const Tensor& tensor) {
    Tensor copy = tensor.clone();
    copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return copy;
  }
  Values lowered_all(const Values& values) const {
    Values all;
    for (const c10::IValue& value : values)
      all.push_back(mapped(value, [](const Tensor& tensor) {
        // A number in host memory is a kernel's argument: copied at the launch.
        return tensor.defined() && tensor.is_cpu() ? number(tensor) : lowered(tensor);
      }));
    return all;
  }
  // Draws are in the order of the launches: the kernel gets the generator as it is now.
  void take_generator() {
    for (size_t i = 0; i < given_.size(); i++) {
      const auto& type = *schema_.arguments()[i].real_type();
      bool here =
          type.kind() == c10::TypeKind::GeneratorType ||
          (type.kind() == c10::TypeKind::OptionalType &&
           type.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
      if (!here) continue;
      generator_ = i;
      at::Generator drawn =
          given_[i].isNone() ? at::detail::getDefaultCPUGenerator() : given_[i].toGenerator();
      std::lock_guard lock(drawn.mutex());
      generator_copy_ = drawn.clone();
    }
  }
  // Stand-ins for the inputs, to see what comes out: zeros are valid indices, and nobody else writes to them.
  Values stand_ins() {
    stand_ins_.clear();
    Values all;
    for (size_t i = 0; i < given_.size(); i++)
      all.push_back(mapped(given_[i], [&](const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
        int64_t extent = 1;
        for (int64_t dim = 0; dim < tensor.dim(); dim++)
          extent += (tensor.size(dim) - 1) * tensor.stride(dim);
        Tensor zeros = at::zeros({tensor.numel() ? extent : 0}, tensor.options().device(at::kCPU));
        stand_ins_.emplace_back(zeros, tensor);
        return zeros.as_strided(tensor.sizes(), tensor.strides());
      }));
    return all;
  }
  // Give outputs that have no size yet the one that they will have.
  void size_outputs() {
    std::vector<size_t> unsized;
    for (size_t i = 0; i < given_.size(); i++)
      if (schema_.arguments()[i].kwarg_only() && writes(schema_.arguments()[i]) && given_[i].isTensor() &&
          given_[i].toTensor().defined() && given_[i].toTensor().numel() == 0)
        unsized.push_back(i);
    if (unsized.empty()) return;
    Values values = stand_ins();
    for (size_t i : unsized) values[i] = at::empty({0}, given_[i].toTensor().options().device(at::kCPU));
    if (generator_copy_) values[*generator_] = generator_copy_->clone();
    called(op_, values);
    for (size_t i : unsized)
      at::native::resize_(given_[i].toTensor(), values[i].toTensor().sizes(), std::nullopt);
  }
  // Run the operator on stand-ins, to see which results come out. False: only what the inputs hold can tell.
  bool foretell() {
    static const auto* by_content =
        new std::set<std::string>{"aten::nonzero",           "aten::masked_select",
                                  "aten::_unique",           "aten::_unique2",
                                  "aten::unique_dim",        "aten::unique_consecutive",
                                  "aten::repeat_interleave", "aten::bincount",
                                  "aten::native_dropout",    "aten::unique_dim_consecutive",
                                  "aten::nonzero_static",    "aten::_assert_async"};
    if (by_content->count(schema_.name())) return false;
    for (const c10::IValue& value : given_)
      if (value.isOptionalTensorList() && fresh_)  // a mask as an index
        for (const std::optional<Tensor>& index : value.toOptionalTensorList())
          if (index && index->defined() &&
              (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
            return false;
    if (!fresh_ && !generator_) return true;
    Values values = stand_ins();
    try {
      at::NoGradGuard no_grad;
      results_ = called(op_, values);
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }
  const c10::IValue& mutated(const c10::Argument& result) const {
    for (size_t i = 0; i < given_.size(); i++) {
      const auto& argument = schema_.arguments()[i];
      if (writes(argument) && argument.alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return given_[i];
    }
    TORCH_CHECK(false, "sim: ", schema_.name(), ": what is returned?");
  }
  Tensor placed(const Tensor& value, bool may_alias) {
    if (!value.defined()) return value;
    auto at = reinterpret_cast<uintptr_t>(value.const_data_ptr());
    if (may_alias && value.numel())
      for (auto& [zeros, input] : stand_ins_) {
        Range range = range_of(zeros);
        if (at < range.begin || at >= range.end) continue;
        auto offset = int64_t(at - range.begin) / input.element_size();
        return input.as_strided(value.sizes(), value.strides(), input.storage_offset() + offset);
      }
    Tensor made = empty_strided(value.sizes(), value.strides(), value.scalar_type(), {}, device_, {});
    fresh_results_.push_back(made);
    only_views_ = false;
    return made;
  }
  // Put the call's results on the stack. Gives the fresh ones as kernels see them.
  std::vector<Tensor> place_results(const Values& results, bool may_alias) {
    only_views_ = fresh_;
    for (const c10::Argument& argument : schema_.arguments()) only_views_ &= !writes(argument);
    torch::jit::drop(*stack_, given_.size());
    size_t number = 0;
    for (const auto& result : schema_.returns()) {
      if (writes(result))
        stack_->push_back(mutated(result));
      else
        stack_->push_back(
            mapped(results[number], [&](const Tensor& value) { return placed(value, may_alias); }));
      number++;
    }
    std::vector<Tensor> to;
    for (const Tensor& tensor : fresh_results_) to.push_back(lowered(tensor));
    return to;
  }
  static void fill(const std::vector<Tensor>& to, const Values& results, const c10::FunctionSchema& schema) {
    size_t next = 0;
    for (size_t i = 0; i < results.size(); i++)
      if (!writes(schema.returns()[i]))
        each_tensor(results[i], [&](const Tensor& value) {
          if (value.defined() && next < to.size()) to[next++].copy_(value);
        });
  }
  // Run the operator on the stream while the host waits, as where its result is a number or has a size that
  // only the inputs tell.
  void run_now() {
    auto values = lowered_all(given_);
    auto results = std::make_shared<Values>();
    auto error = std::make_shared<std::exception_ptr>();
    launch(uses_of(given_), [op = op_, values, results, error] {
      try {
        *results = called(op, values);
      } catch (...) {
        *error = std::current_exception();
      }
    });
    synchronize(*device_, current_stream[device_->index()]);
    if (*error) std::rethrow_exception(*error);
    std::vector<Tensor> to = place_results(*results, false);
    if (to.empty()) return;
    Uses uses;
    for (const Tensor& tensor : fresh_results_) add_ranges(tensor, uses.writes);
    launch(uses, [to, results, op = op_] { fill(to, *results, op.schema()); });
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  Values given_, results_;
  std::optional<c10::Device> device_;
  std::optional<size_t> generator_;
  std::optional<at::Generator> generator_copy_;
  bool plain_ = false, fresh_ = false, only_views_ = false;
  std::vector<std::pair<Tensor, Tensor>> stand_ins_;  // of which input
  std::vector<Tensor> fresh_results_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Failure::one().check();
  Origin origin;
  Call(op, stack).run();
}

}  // namespace sim
