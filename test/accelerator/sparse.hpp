// Sparse COO tensors, as far as the gradients of embeddings need them.
#pragma once
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zero_native.h>

#include "library.hpp"

namespace sim {

inline Tensor sparse_of(const Tensor& indices, const Tensor& values, const Tensor& like) {
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes());
}
// As on CUDA, the host waits to learn how many elements are left.
inline Tensor coalesce(const Tensor& self) {
  Tensor host = sparse_of(self._indices().cpu(), self._values().cpu(), self).coalesce();
  Tensor result = sparse_of(host._indices().to(self.device()), host._values().to(self.device()), self);
  return result._coalesced_(true);
}
// A dense or a sparse tensor, and a sparse one.
inline Tensor& add_sparse_(Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  if (self.is_sparse()) {
    Tensor sum = sparse_of(at::cat({self._indices(), other._indices()}, 1),
                           at::cat({self._values(), other._values() * alpha}), self);
    return at::native::copy_sparse_(self, sum, false);
  }
  TORCH_CHECK(other.is_sparse() && other.sparse_dim() == 1,
              "sim: only sparse tensors with one sparse dimension");
  self.index_add_(0, other._indices()[0], other._values(), alpha);
  return self;
}
inline Tensor add_sparse(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  Tensor sum = self.clone();
  return add_sparse_(sum, other, alpha);
}
inline Tensor div_sparse(const Tensor& self, const Tensor& by) {
  return sparse_of(self._indices(), self._values() / by, self)._coalesced_(self.is_coalesced());
}
// What a dense tensor has where a sparse one has elements.
inline Tensor sparse_mask(const Tensor& self, const Tensor& mask) {
  TORCH_CHECK(mask.sparse_dim() == 1, "sim: only sparse tensors with one sparse dimension");
  Tensor values = self.index_select(0, mask._indices()[0]);
  return sparse_of(mask._indices(), values, mask)._coalesced_(mask.is_coalesced());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  namespace native = at::native;
  m.impl("_sparse_coo_tensor_with_dims_and_tensors",
         TORCH_FN(native::new_with_dims_and_tensor_sparse_symint));
  m.impl("_sparse_coo_tensor_with_dims", TORCH_FN(native::new_with_dims_sparse));
  m.impl("empty.memory_format", TORCH_FN(native::empty_sparse_symint));
  m.impl("_indices", TORCH_FN(native::_indices_sparse));
  m.impl("_values", TORCH_FN(native::_values_sparse));
  m.impl("indices", TORCH_FN(native::indices_sparse));
  m.impl("values", TORCH_FN(native::values_sparse));
  m.impl("_nnz", TORCH_FN(native::_nnz_sparse));
  m.impl("is_coalesced", TORCH_FN(native::is_coalesced_sparse));
  m.impl("_coalesced_", TORCH_FN(native::_coalesced_sparse_));
  m.impl("sparse_dim", TORCH_FN(native::sparse_dim_sparse));
  m.impl("dense_dim", TORCH_FN(native::dense_dim_sparse));
  m.impl("_dimI", TORCH_FN(native::sparse_dim_sparse));
  m.impl("_dimV", TORCH_FN(native::dense_dim_sparse));
  m.impl("clone", TORCH_FN(native::clone_sparse));
  m.impl("copy_", TORCH_FN(native::copy_sparse_wrapper_));
  m.impl("copy_sparse_to_sparse_", TORCH_FN(native::copy_sparse_));
  m.impl("zero_", TORCH_FN(native::zero_sparse_));
  m.impl("sparse_mask", TORCH_FN(sparse_mask));
  m.impl("_coalesce", TORCH_FN(coalesce));
  m.impl("add_.Tensor", TORCH_FN(add_sparse_));
  m.impl("add.Tensor", TORCH_FN(add_sparse));
  m.impl("div.Tensor", TORCH_FN(div_sparse));
}

}  // namespace sim
