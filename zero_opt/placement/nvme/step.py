"""What one step does to a window of state, and what of it must be kept if a disk fails in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import AdamHypers, AdamUpdate, adam_update_
from ...kernels.adam_state import MOMENTS
from ...kernels.checks import GRAD_DTYPES
from ...reduction.interface import GradShard
from ...sharding.flat_param import FlatParam, own_writes
from ...system.devices import HOST
from ...system.interrupts import uninterrupted
from ..adam_rules import MAXIMUM
from ..masters import follow_param
from .extents import FileShard, Segment
from .window_pass import Buffer, Disk, FileWindow, WindowPass


class Hypers(NamedTuple):
    """What a step is made with.

    Attributes:
        groups, amsgrad: one per param group. grad_scale: gradients are multiplied by it.
        threads, flush_denormals: see :func:`adam_update_`.
    """

    groups: Sequence[AdamHypers]
    amsgrad: Sequence[bool]
    grad_scale: float
    threads: int | None
    flush_denormals: bool


class FileStep:
    """A step, begun and not complete.

    Attributes:
        buckets: indices of those that are used on any rank, in order.
        windows: the pass over those windows that have a used slice. segments: the used ones per window, by number.
    """

    def __init__(
        self,
        grads: Sequence[GradShard],
        shards: Mapping[int, FileShard],
        hypers: Hypers,
        windows: Iterable[tuple[FileWindow, Sequence[Segment]]],
        buffers: Sequence[Buffer],
        disk: Disk,
    ) -> None:
        self.buckets = [found.bucket for found in grads if found.used]
        self.segments: dict[int, list[Segment]] = {}
        self._hypers = hypers
        self._used: dict[int, tuple[FileShard, list[int]]] = {}
        self._grads: dict[tuple[int, int], Tensor] = {}
        self._following: set[tuple[int, int]] = set()
        self._dropped: set[tuple[int, int]] = set()
        self._kept = False
        for found in grads:
            shard = shards[found.bucket]
            positions = [position for position, grad in enumerate(found.grads) if grad is not None]
            if positions:
                self._used[found.bucket] = (shard, positions)
            for position in positions:
                self._take(shard, position, found.grads[position])
        used = []
        for window, parts in windows:
            stretches = [piece for part in parts if part.slice_key in self._grads for piece in part.stretches()]
            if stretches:
                self.segments[window.number] = stretches
                used.append(window)
        self.windows = WindowPass(used, buffers, disk)

    def _take(self, shard: FileShard, position: int, grad: Tensor | None) -> None:
        assert grad is not None
        key = (shard.index, position)
        self._grads[key] = shard.flat_grad(position, grad)
        if shard.edited(position):
            self._following.add(key)
        shard.follow(position)

    def left(self) -> list[Segment]:
        """What has not been stepped yet."""
        return [part for window in self.windows.unchanged for part in self.segments[window.number]]

    # -- a window -----------------------------------------------------------------------------------------------------

    def change(self, window: FileWindow, arrays: dict[str, Tensor]) -> None:
        """Step a window, and the parameters that it is the state of; all of it or, with an exception, nothing."""
        parts = self.segments[window.number]
        updates = [self._update(part, arrays) for part in parts]
        with own_writes([part.shard.flats[part.position] for part in parts]):
            adam_update_(
                updates,
                grad_scale=self._hypers.grad_scale,
                threads=self._hypers.threads,
                flush_denormals=self._hypers.flush_denormals,
            )
            for part, update in zip(parts, updates, strict=True):
                target, result = self._param(part), update.param if update.out is None else update.out
                if part.slice_key not in self._dropped and result.data_ptr() != target.data_ptr():
                    target.copy_(result)

    def _param(self, part: Segment) -> Tensor:
        """The parameter's elements, (part numel,)."""
        return part.shard.param_run(part.position)[part.at]

    def _update(self, part: Segment, arrays: Mapping[str, Tensor]) -> AdamUpdate:
        shard, target = part.shard, self._param(part)
        dropped, number = part.slice_key in self._dropped, shard.bucket.layout.group
        master, out = target, None
        if not shard.direct:
            master = arrays["master"][part.where]
            if part.slice_key in self._following:
                follow_param(master, target)
            if shard.param_dtype is not torch.float32:
                out = torch.empty_like(target, device=HOST) if dropped or not target.is_cpu else target
        elif dropped:
            master = target.clone()
        grad = self._grads[part.slice_key][part.at].to(HOST)
        return AdamUpdate(
            name=shard.flats[part.position].label,
            hypers=self._hypers.groups[number].for_mean_of(shard.gradients[part.position]),
            step=part.steps + 1,
            param=master,
            grad=grad if grad.dtype in GRAD_DTYPES else grad.float(),
            **{role: arrays[role][part.where] for role in MOMENTS},
            max_exp_avg_sq=arrays[MAXIMUM][part.where] if self._hypers.amsgrad[number] else None,
            out=out,
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def store(self, bucket: int) -> None:
        """Bring what was stepped in mirrors of a bucket's parameters into those."""
        if bucket in self._used:
            shard, positions = self._used[bucket]
            flats = [shard.flats[position] for position in positions]
            with uninterrupted(), own_writes(flats):
                for flat in flats:
                    flat.store()

    def count(self) -> None:
        """All windows are saved."""
        for shard, positions in self._used.values():
            shard.count_step(positions)

    def keep(self) -> None:
        """The step has failed: let it outlive the backward that gave the gradients, and be seen as far as it went."""
        if not self._kept:
            self._grads = {key: self._grads[key].clone() for key in {part.slice_key for part in self.left()}}
            self._kept = True
        for bucket in self._used:
            self.store(bucket)

    def edited(self) -> Iterator[FlatParam]:
        """Parameters that the user has changed since the step began."""
        for shard, positions in self._used.values():
            yield from (shard.flats[position] for position in positions if shard.edited(position))

    def keep_edits(self) -> None:
        """Parameters that the user has changed keep that, and miss the update; their moments do not."""
        for bucket, (shard, positions) in self._used.items():
            self._dropped |= {(bucket, position) for position in positions if shard.edited(position)}
