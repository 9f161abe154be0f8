"""Masters and state in host memory, stepped in this process, for parameters that may lie on an accelerator.

Gradients leave in their own dtype, on a stream of their own, and parameters come back in theirs: while the processor
steps one sub-group, the gradients of the next arrive and the parameters of the one before return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..buckets import GradBucket
from ..policies import AdamState, CPUOffload
from ..reduction.base import GradShard
from ..streams import build_streams
from .device import BucketwisePlacement, Work
from .master_shard import HALVES
from .units import PLAIN, SPLIT, Found, InPlace, Mastered, Unit

_MIB = 2**20


class Lane:
    """The way between one device and host memory: a stream, and host buffers that gradients arrive in.

    Args:
        least_nbytes: buffers are at least so large, to serve any sub-group.
    """

    def __init__(self, device: torch.device, *, pinned: bool, least_nbytes: int) -> None:
        self.streams = build_streams(device)
        self.pinned = pinned and device.type == "cuda"
        self._least_nbytes = least_nbytes
        self._free: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """A buffer of at least so many bytes; :meth:`give_back` it."""
        for number, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(number)
        del self._free[:1]  # the new one takes its place
        return torch.empty(max(nbytes, self._least_nbytes), dtype=torch.uint8, pin_memory=self.pinned)

    def give_back(self, buffer: Tensor) -> None:
        """Nobody reads it any more."""
        self._free.append(buffer)


class InHost(Mastered):
    """A sub-group in host memory: fp32 masters of bf16 and fp16 parameters; of others, and split ones, a copy.

    ``_results`` is what goes back to the parameters, in their dtype: what is stepped, where that has it.
    """

    def __init__(self, bucket: GradBucket, members: Sequence[int], form: AdamState, lane: Lane) -> None:
        self._lane = lane
        self._buffer: Tensor | None = None
        self._arrived: Any = None
        super().__init__(bucket, members, form)

    def _make_stepped(self, device: torch.device) -> list[Tensor]:  # noqa: ARG002  (in host memory, whichever it is)
        host, positions = torch.device("cpu"), range(len(self.pieces))
        self._results = [self._blank(at, self.param_dtype, host, pinned=self._lane.pinned) for at in positions]
        if self.param_dtype in HALVES and self.form is PLAIN:
            return [self._blank(at, torch.float32, host) for at in positions]
        return self._results

    def fetch(self, found: Found) -> None:
        """See :class:`Unit`: copies are enqueued, after what the current stream is doing."""
        sizes = [-(-grad.numel() * grad.element_size() // 64) * 64 for _, grad in found if not grad.is_sparse]
        self._buffer, start, arriving = self._lane.take(sum(sizes)), 0, []
        streams = self._lane.streams
        _, ready = streams.produced()
        with streams.side([ready], [grad for _, grad in found]):
            for position, grad in found:
                if grad.is_sparse:
                    arriving.append((position, grad.cpu()))
                    continue
                stop = start + grad.numel() * grad.element_size()
                run = self._buffer[start:stop].view(grad.dtype)
                start = -(-stop // 64) * 64
                arriving.append((position, self.shaped(run, position)))
                arriving[-1][1].copy_(grad, non_blocking=True)
            _, self._arrived = streams.produced()
        self._found = arriving

    def grads(self) -> Found:
        """See :class:`Unit`. What went back to parameters before has left host memory too: it is the same stream."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return super().grads()

    def result(self, position: int) -> Tensor:
        """See :class:`MasterShard`."""
        return self._run_of(self._results[position])

    def target(self, position: int) -> Tensor:
        """See :class:`Unit`."""
        return self._results[position]

    def round(self, positions: Sequence[int]) -> None:
        """See :class:`Unit`."""
        if self.stepped is not self._results:
            torch._foreach_copy_([self._results[at] for at in positions], [self.stepped[at] for at in positions])

    def send(self, positions: Sequence[int]) -> None:
        """See :class:`Unit`; the current stream waits for it, the processor does not."""
        streams = self._lane.streams
        _, ready = streams.produced()
        with streams.side([ready], []):
            self.write_params(positions)
        streams.join()
        if self._buffer is not None:
            self._lane.give_back(self._buffer)
            self._buffer = None

    def native_writes(self) -> AbstractContextManager[None]:
        """See :class:`Unit`; it writes to host memory alone."""
        return nullcontext()

    def resident(self) -> Sequence[Tensor]:
        """See :class:`Unit`; nothing."""
        return ()


class HostUnits:
    """Cuts buckets into what stays on their device and sub-groups in host memory; those on the CPU it leaves whole.

    Attributes:
        least_nbytes: of a host buffer that gradients arrive in.
    """

    def __init__(self, policy: CPUOffload, master_dtype: object) -> None:
        self._policy, self._split = policy, master_dtype == "split"
        self._lanes: dict[torch.device, Lane] = {}
        self.least_nbytes = int(policy.subgroup_mb * _MIB)

    def __call__(self, buckets: Sequence[GradBucket]) -> list[Sequence[Unit]]:
        """The units of each bucket."""
        staying = self.staying([bucket for bucket in buckets if not self._is_host(bucket)])
        return [self._units(bucket, staying) for bucket in buckets]

    def _is_host(self, bucket: GradBucket) -> bool:
        return bucket.device.type == "cpu"

    def staying(self, buckets: Sequence[GradBucket]) -> set[int]:
        """The parameters that stay: registered first, so reduced last, when the processor has had work for long."""
        numels = {piece.param: piece.in_param.numel for bucket in buckets for piece in bucket.slices}
        room, staying = (1 - self._policy.ratio) * sum(numels.values()), set()
        for index in sorted(numels):
            room -= numels[index]
            if room < 0:
                break
            staying.add(index)
        return staying

    def _units(self, bucket: GradBucket, staying: set[int]) -> Sequence[Unit]:
        members, split = range(len(bucket.slices)), self._split and bucket.params[0].param.dtype is torch.bfloat16
        if self._is_host(bucket):
            return [on_device(bucket, members, SPLIT if split else PLAIN)]
        if bucket.device not in self._lanes:
            self._lanes[bucket.device] = Lane(
                bucket.device, pinned=self._policy.pin_memory, least_nbytes=self.least_nbytes
            )
        units: list[Unit] = []
        stays = [member for member in members if bucket.slices[member].param in staying]
        if stays:
            units.append(on_device(bucket, stays, PLAIN))
        for group in self.sub_groups(bucket, [member for member in members if member not in stays]):
            units.append(InHost(bucket, group, SPLIT if split else PLAIN, self._lanes[bucket.device]))
        return units

    def sub_groups(self, bucket: GradBucket, members: Sequence[int]) -> Iterator[list[int]]:
        """Neighbouring slices, as many as fit."""
        most = self._policy.subgroup_mb * _MIB / bucket.shard_dtype.itemsize
        group, room = list[int](), most
        for member in members:
            numel = bucket.slices[member].in_param.numel
            if group and numel > room:
                yield group
                group, room = [], most
            group.append(member)
            room -= numel
        if group:
            yield group


def on_device(bucket: GradBucket, members: Sequence[int], form: Any) -> Unit:
    """Slices that are stepped on their own device, bf16 and fp16 ones with masters."""
    if bucket.params[0].param.dtype in HALVES and form is PLAIN:
        return Mastered(bucket, members)
    return InPlace(bucket, members, form)


class CPUPlacement(BucketwisePlacement):
    """See the module. What stays on a device is enqueued there first, and steps while the CPU steps the rest."""

    def _step_shards(self, grads: Sequence[GradShard], grad_scale: float) -> Iterator[int]:
        works: Mapping[int, list[Work]] = {shard.bucket: list(self._works([shard])) for shard in grads}
        everything = [work for found in works.values() for work in found]
        coming = deque(work for work in everything if isinstance(work.unit, InHost))
        early = [work for work in everything if coming and not isinstance(work.unit, InHost)]
        for work in early:
            work.unit.fetch(work.found)
            self._step_unit(work, grad_scale)
        self._fetch_next(coming)
        for shard in grads:
            for work in works[shard.bucket]:
                if isinstance(work.unit, InHost):
                    self._fetch_next(coming)
                    self._step_unit(work, grad_scale)
                elif not early:
                    work.unit.fetch(work.found)
                    self._step_unit(work, grad_scale)
            if shard.used:
                yield shard.bucket

    def _fetch_next(self, coming: deque[Work]) -> None:
        """Let the gradients of one more sub-group come."""
        if coming:
            work = coming.popleft()
            work.unit.fetch(work.found)
