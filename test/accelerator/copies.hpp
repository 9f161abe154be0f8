// Copies: within a device, between devices, and from and to host memory.
#pragma once
#include "kernels.hpp"

namespace sim {

inline bool same_order(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         ((a.is_contiguous() && b.is_contiguous()) ||
          (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}
inline bool overlaps_host(const Tensor& host) {
  return pinned == Pinned::kAll ||
         (pinned == Pinned::kAllocated && PinnedAllocator::one().has(host.const_data_ptr()));
}

inline void copy_between_devices(const Tensor& self, const Tensor& dst) {
  Uses uses;
  add_ranges(self, uses.reads), add_ranges(dst, uses.writes);
  Locked lock(world());
  Stream &source = here(self.device()), &target = here(dst.device());
  if (&source != &target) source.await(target.mark());
  source.launch("copy_", uses, [from = lowered(self), to = lowered(dst)] { to.copy_(from); });
  if (&source != &target) target.await(source.mark());
}

// A copy to the device. Of memory that is not page-locked, or must be converted first, the driver takes a
// copy at once.
inline MarkPtr copy_from_host(const Tensor& self, const Tensor& dst) {
  bool tracked = overlaps_host(self) && same_order(self, dst);
  Tensor bytes = self.scalar_type() == dst.scalar_type() ? self.clone() : self.to(dst.scalar_type());
  Uses uses;
  add_ranges(dst, uses.writes);
  std::vector<HostCopyPtr> sources, dropped;
  auto copy = std::make_shared<HostCopy>(self, bytes, false);
  Locked lock(world());
  Stream& stream = here(dst.device());
  Access access = stream.note("copy_ from host memory", {});
  copy->access = access;
  if (tracked) sources = HostCopies::one().add(copy, stream.clock, dropped);
  if (!sources.empty()) copy->settled = true;  // the host memory is still to be written
  stream.launch("copy_ from host memory", uses,
                [copy, sources, from = self.detach(), to = lowered(dst), tracked] {
                  for (const HostCopyPtr& source : sources) source->show();
                  if (tracked && sources.empty()) {
                    Locked lock(world());
                    HostCopies::compare(*copy, "before the copy ran");
                  }
                  to.copy_(sources.empty() ? copy->bytes : from);
                  c10::intrusive_ptr<c10::StorageImpl> released;  // dies after the lock is released
                  Locked lock(world());
                  released = copy->release();
                  copy->ran = true;
                });
  return stream.mark();
}

// A copy to the host, which sees NaN until it has waited for the copy.
inline MarkPtr copy_to_host(const Tensor& self, const Tensor& dst) {
  Uses uses;
  add_ranges(self, uses.reads);
  std::vector<HostCopyPtr> dropped;
  auto copy = std::make_shared<HostCopy>(dst, at::empty_like(dst), true);
  Locked lock(world());
  Stream& stream = here(self.device());
  copy->access = stream.note("copy_ to host memory", {});
  HostCopies::one().add(copy, stream.clock, dropped);
  copy->poison();
  stream.launch("copy_ to host memory", uses, [copy, from = lowered(self)] {
    copy->bytes.copy_(from);
    copy->ran = true;
  });
  // The kernel's own tick is later than the note's: the copy is over once that is known.
  copy->access.tick = stream.clock.ticks[stream.agent];
  return stream.mark();
}

inline Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Failure::one().check();
  if (!dst.numel()) return dst;
  Quiet quiet;
  Origin origin;
  if (!self.is_cpu() && !dst.is_cpu()) {
    copy_between_devices(self, dst);
  } else if (self.is_cpu()) {
    bool blocking = !non_blocking || pinned == Pinned::kNone;
    Tensor from = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
    MarkPtr done = copy_from_host(from, dst);
    if (blocking) host_wait(done);
  } else if (self.sizes() == dst.sizes() && dst.is_contiguous() && overlaps_host(dst)) {
    MarkPtr done = copy_to_host(self, dst);
    if (!non_blocking) host_wait(done);
  } else {
    // Into memory in another order, or not page-locked: by way of memory of the driver's, while the host
    // waits.
    Tensor whole = at::empty(self.sizes(), dst.options());
    host_wait(copy_to_host(self, whole));
    const_cast<Tensor&>(dst).copy_(whole);
  }
  return dst;
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}

inline at::Scalar local_scalar(const Tensor& self) {
  Quiet quiet;
  Origin origin;
  Tensor host = at::empty(self.sizes(), self.options().device(at::kCPU));
  host_wait(copy_to_host(self, host));
  return host.item();
}

}  // namespace sim
