"""Masters and state in host memory, stepped in this process, for parameters that may lie on an accelerator.

Gradients leave in their own dtype and parameters come back in theirs, each direction on a stream of its own: while the
processor steps one sub-group, the gradients of the next arrive and the parameters of the one before return.

[Note: what copies wait for]
A step notes an event at its start, on the stream that it runs on. Gradients are reduced by then, and nothing reads or
writes parameters after it but copies of ours: all copies in both directions wait for that event alone, so that no
gradient waits for parameters that return, nor for what is stepped on the device meanwhile. The processor waits for
gradients to arrive before it reads them, and for results to have left before it overwrites them. The stream that the
step runs on waits for parameters that return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.adam_state import HALVES
from ...kernels.threads import checked_threads, torch_threads
from ...policies import AdamState, CPUOffload
from ...reduction.interface import GradShard
from ...sharding.buckets import GradBucket
from ...system.devices import HOST, build_streams, is_host
from ...system.pinned_memory import HostMemory, host_memory, pinned_memory
from ..compact_state import form_of
from .placement import DevicePlacement, Work
from .units import DeviceUnits, Mastered, ResultCopies, SliceGrads, Unit, on_device

_MIB = 2**20
# Every run of a slice begins at a multiple of this.
_RUN_ALIGN = 64


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _RUN_ALIGN) * _RUN_ALIGN


class Room(NamedTuple):
    """Bytes of host memory for sub-groups of one device.

    Attributes:
        results: for what goes back to the parameters of all of them. grads: for the gradients of the largest one.
    """

    results: int
    grads: int


def room_for(parts: Iterable[tuple[GradBucket, Sequence[int]]]) -> Room:
    """Return the room that sub-groups take, each given as a bucket and positions of its slices."""
    results, largest = 0, 0
    for bucket, members in parts:
        own = bucket.params[0].param.element_size()
        widest = max(own, bucket.shard_dtype.itemsize)  # gradients that are reduced already have the parameters' dtype
        numels = [bucket.slices[member].in_param.numel for member in members]
        results += sum(_aligned(numel * own) for numel in numels)
        largest = max(largest, sum(_aligned(numel * widest) for numel in numels))
    return Room(results, largest)


class HostLink:
    """The way between one device and host memory: a stream per direction, and the host memory at its end.

    Attributes:
        arriving, leaving: gradients arrive in host memory on the side stream of the one, results leave on the other's.
        start: an event; see [Note: what copies wait for].
        results: memory for what goes back to the parameters. buffers: what gradients arrive in.

    Args:
        allocate: makes host memory of so many bytes.
    """

    def __init__(self, device: torch.device, allocate: Callable[[int], HostMemory]) -> None:
        self.arriving, self.leaving = build_streams(device), build_streams(device)
        self.start: Any = None
        self._allocate = allocate
        self.results: list[HostMemory] = []
        self.buffers: list[HostMemory] = []
        self._free: list[HostMemory] = []
        self._largest_nbytes = self._carved_nbytes = 0

    def begin(self) -> None:
        """Note that a step begins."""
        _, self.start = self.leaving.produced()

    def reserve(self, room: Room) -> None:
        """Allocate memory for more results, and let each buffer hold the gradients of any sub-group."""
        self._largest_nbytes = max(self._largest_nbytes, room.grads)
        self.results.append(self._allocate(room.results))
        self._carved_nbytes = 0

    def carve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return so many zeros of the memory that was reserved last, 1-D."""
        start, stop = self._carved_nbytes, self._carved_nbytes + numel * dtype.itemsize
        self._carved_nbytes = _aligned(stop)
        return self.results[-1].bytes[start:stop].view(dtype)

    def take(self, nbytes: int) -> HostMemory:
        """Return a buffer of at least so many bytes; :meth:`give_back` it."""
        for number, buffer in enumerate(self._free):
            if buffer.bytes.numel() >= nbytes:
                return self._free.pop(number)
        if self._free:  # the new buffer takes its place
            smaller = self._free.pop(0)
            self.buffers.remove(smaller)
            smaller.release()
        self.buffers.append(self._allocate(max(nbytes, self._largest_nbytes)))
        return self.buffers[-1]

    def give_back(self, buffer: HostMemory) -> None:
        """Let other gradients arrive in a buffer."""
        self._free.append(buffer)

    def close(self) -> None:
        """Release all memory."""
        for memory in (*self.results, *self.buffers):
            memory.release()


class InHost(Mastered):
    """A sub-group in host memory: fp32 masters of bf16 and fp16 parameters; of others, and split ones, a copy.

    ``_results`` is what goes back to the parameters, in their dtype: what is stepped, where that has it.
    """

    def __init__(self, bucket: GradBucket, members: Sequence[int], form: AdamState, link: HostLink) -> None:
        self._link, self._memory = link, link.results[-1]
        self._buffer: HostMemory | None = None
        self._sources: SliceGrads = ()
        self._arrived: Any = None
        self._left: Any = None
        super().__init__(bucket, members, form)

    def _make_stepped(self, device: torch.device) -> list[Tensor]:  # noqa: ARG002  (in host memory, whichever it is)
        numels = [piece.in_param.numel for piece in self.pieces]
        self._results = [self.shaped(self._link.carve(numel, self.param_dtype), at) for at, numel in enumerate(numels)]
        if self.param_dtype in HALVES and not self.splits:
            return [self._blank(at, torch.float32, HOST) for at in range(len(self.pieces))]
        return self._results

    def own_writes(self, positions: Sequence[int]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Nothing to note: targets are in host memory, and what brings them to the parameters notes that."""
        return nullcontext()

    def fetch(self, grads: SliceGrads) -> None:
        """Enqueue copies of gradients to host memory, and hold their sources until the copies are over."""
        self._return_buffer()  # a step that was interrupted has left it
        sizes = [_aligned(grad.numel() * grad.element_size()) for _, grad in grads if not grad.is_sparse]
        self._buffer, self._sources = self._link.take(sum(sizes)), grads
        streams = self._link.arriving
        with streams.side([self._link.start], []):
            try:
                self._grads = list(self._copied(grads, self._buffer.bytes))
            finally:
                _, self._arrived = streams.produced()
                self._buffer.used(self._arrived)

    def _copied(self, grads: SliceGrads, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Enqueue copies of gradients to host memory, and yield these."""
        start = 0
        for position, grad in grads:
            if grad.is_sparse:
                yield position, grad.cpu()
                continue
            stop = start + grad.numel() * grad.element_size()
            run = buffer[start:stop].view(grad.dtype)
            start = _aligned(stop)
            # In one order of elements: between two, torch may copy by way of host memory that no event guards.
            run.copy_(self.flat_grad(position, grad), non_blocking=True)
            yield position, self.shaped(run, position)

    def grads(self) -> SliceGrads:
        """Wait for the gradients, and for the last step's results to have left host memory."""
        for event in (self._arrived, self._left):
            if event is not None:
                event.synchronize()
        self._sources = ()
        return super().grads()

    def result(self, position: int) -> Tensor:
        return self._run_of(self._results[position])

    def targets(self, positions: Sequence[int]) -> list[Tensor]:
        return [self._results[position] for position in positions]

    def result_copies(self, positions: Sequence[int]) -> ResultCopies:
        if self.stepped is self._results:
            return (), ()
        return (), [(self._results[at], self.stepped[at]) for at in positions]

    def send(self, positions: Sequence[int]) -> None:
        """Enqueue copies of results to parameters; the current stream waits for them, the processor does not."""
        streams = self._link.leaving
        with streams.side([self._link.start], []):
            try:
                self.write_params(positions)
            finally:
                _, self._left = streams.produced()
                self._memory.used(self._left)
        streams.wait(self._left)
        self._return_buffer()

    def _return_buffer(self) -> None:
        if self._buffer is not None:
            self._link.give_back(self._buffer)
            self._buffer = None

    def resident(self) -> Sequence[Tensor]:
        """Nothing: all of it is in host memory."""
        return ()


class HostUnits(DeviceUnits):
    """The maker of units that stay on their device, and of sub-groups in host memory; buckets on the CPU stay whole."""

    def __init__(self, policy: CPUOffload, form: AdamState) -> None:
        super().__init__(form)
        self._policy = policy
        self._links: dict[torch.device, HostLink] = {}

    @property
    def spare_nbytes(self) -> int:
        return sum(memory.bytes.numel() for link in self._links.values() for memory in link.results)

    @property
    def staging_nbytes(self) -> int:
        return sum(buffer.bytes.numel() for link in self._links.values() for buffer in link.buffers)

    def class_threads(self) -> AbstractContextManager[None]:
        return torch_threads(checked_threads(self._policy.threads))

    def begin(self) -> None:
        for link in self._links.values():
            link.begin()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def __call__(self, buckets: Sequence[GradBucket]) -> list[list[Unit]]:
        away = [bucket for bucket in buckets if not is_host(bucket.device)]
        staying = self.staying(away)
        for device in dict.fromkeys(bucket.device for bucket in away):
            there = [bucket for bucket in away if bucket.device == device]
            if device not in self._links:
                locked = partial(pinned_memory, device=device)
                self._links[device] = HostLink(device, locked if self._policy.pin_memory else host_memory)
            self._links[device].reserve(room_for(self.leaving(there, staying)))
        return [self._units(bucket, staying) for bucket in buckets]

    def staying(self, buckets: Sequence[GradBucket]) -> set[int]:
        """Return the parameters that stay: registered first, so reduced last, when the processor has long had work."""
        numels = {piece.param: piece.in_param.numel for bucket in buckets for piece in bucket.slices}
        room, staying = (1 - self._policy.ratio) * sum(numels.values()), set()
        for index in sorted(numels):
            room -= numels[index]
            if room < 0:
                break
            staying.add(index)
        return staying

    def _units(self, bucket: GradBucket, staying: set[int]) -> list[Unit]:
        members = range(len(bucket.slices))
        if is_host(bucket.device):
            return on_device(bucket, members, self._form)
        stays = [member for member in members if bucket.slices[member].param in staying]
        form, link = form_of(bucket, self._form), self._links[bucket.device]
        away = [InHost(bucket, group, form, link) for _, group in self.leaving([bucket], staying)]
        return [*on_device(bucket, stays, AdamState(master="float32")), *away]

    def leaving(
        self, buckets: Iterable[GradBucket], staying: Collection[int]
    ) -> Iterator[tuple[GradBucket, list[int]]]:
        """Yield the sub-groups of buckets: neighboring slices that do not stay, as many as fit."""
        for bucket in buckets:
            most = self._policy.subgroup_mb * _MIB / bucket.shard_dtype.itemsize
            group, room = list[int](), most
            for member, piece in enumerate(bucket.slices):
                if piece.param in staying:
                    continue
                if group and piece.in_param.numel > room:
                    yield bucket, group
                    group, room = [], most
                group.append(member)
                room -= piece.in_param.numel
            if group:
                yield bucket, group


class CPUPlacement(DevicePlacement):
    """A shard that is stepped in host memory, while what stays on a device is stepped there."""

    def _step_shards(self, grads: Sequence[GradShard], grad_scale: float) -> Iterator[int]:
        works: Mapping[int, list[Work]] = {shard.bucket: list(self._works([shard])) for shard in grads}
        everything = [work for of_bucket in works.values() for work in of_bucket]
        coming = deque(work for work in everything if isinstance(work.unit, InHost))
        early = [work for work in everything if coming and not isinstance(work.unit, InHost)]
        self._fetch_next(coming)
        for work in early:
            self._fetch_and_step(work, grad_scale)
        for shard in grads:
            for work in works[shard.bucket]:
                if isinstance(work.unit, InHost):
                    self._fetch_next(coming)
                    self._step_unit(work, grad_scale)
                elif not early:
                    self._fetch_and_step(work, grad_scale)
            if shard.used:
                yield shard.bucket

    def _fetch_next(self, coming: deque[Work]) -> None:
        """Let the gradients of one more sub-group come."""
        if coming:
            work = coming.popleft()
            work.unit.fetch(work.grads)
