// The operators' registration with torch.
#pragma once
#include <ATen/autocast_mode.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include "copies.hpp"

namespace sim {

inline Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                    std::optional<c10::Device> device, std::optional<bool>,
                    std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
inline Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}
inline Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
inline Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
inline Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
inline Tensor view_as_real(const Tensor& self) { return at::native::view_as_real(self); }
inline Tensor view_as_complex(const Tensor& self) { return at::native::view_as_complex(self); }
inline const Tensor& resize(const Tensor& self, c10::IntArrayRef size,
                            std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}
inline Tensor& set_storage(Tensor& self, c10::Storage source) { return at::native::set_(self, source); }
inline Tensor& set_strided(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                           c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
inline void record_stream(Tensor& self, c10::Stream stream) {
  allocator().use_on(self.storage().data_ptr(), stream.id());
}
// As between CUDA and the CPU, tensors may take each other's data.
inline bool compatible(const Tensor& self, const Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", view_as_real);
  m.impl("view_as_complex", view_as_complex);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", compatible);
}
// Where the CPU has a kernel of its own and other devices the sum of several operators: the bits are to be
// the CPU's.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"native_layer_norm", "native_group_norm", "addr", "addr.out", "_stack",
                           "_stack.out", "any.dims", "any.dims_out", "all.dims", "all.dims_out",
                           "linalg__powsum", "silu_backward", "mish_backward", "native_channel_shuffle"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
// Copies see to conjugate and negative views themselves, as on other devices.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// torch.autocast("sim"): the operators that training uses most.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
}

}  // namespace sim
