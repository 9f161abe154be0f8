// The extension module. Tensors arrive as raw addresses, checked by zero_opt/kernels, or are read by DLPack's C
// interface, so that one binary serves every version of torch.
#include "bindings/bindings.hpp"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native kernels of zero_opt. Addresses and sizes go in unchecked: call zero_opt.cpu_adam instead.";
  zero_opt::bindings::bind_kernels(m);
  zero_opt::bindings::bind_threads(m);
  zero_opt::bindings::bind_step(m);
  zero_opt::bindings::bind_exchange(m);
  zero_opt::bindings::bind_worker(m);
  zero_opt::bindings::bind_many(m);
}
