"""What one step does to a window of state, and what of it must be kept if a disk fails in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ...kernels.adam_state import follow_param, span_of, state_dtypes
from ...kernels.checks import GRAD_DTYPES, check_apart, check_tensor
from ...kernels.runs import BoundRun, check_arrays, step_runs
from ...kernels.updates import StepHypers
from ...reduction.interface import GradShard, used_params
from ...sharding.flat_param import own_writes
from ...system.devices import HOST
from ...system.interrupts import uninterrupted
from .extents import FileShard, Segment
from .window_pass import Buffer, Disk, FileWindow, WindowPass

# Hyperparameters, and the runs that have them.
StepBatch = tuple[StepHypers, list[BoundRun]]


def step_batches(batches: Iterable[StepBatch], *, grad_scale: float, threads: int, flush_denormals: bool) -> None:
    """Step runs by their gradients, multiplied by ``grad_scale`` first, in one native call."""
    with torch.no_grad():
        calls = [(hypers.for_kernel(grad_scale), runs) for hypers, runs in batches]
        step_runs(calls, threads=threads, flush_denormals=flush_denormals)


class FileStep:
    """A step, begun and not complete.

    Attributes:
        buckets: indices of those that are used on any rank, in order.
        used: what is stepped here: shards, and positions of their slices.
        windows: the pass over those windows that have a used slice. segments: the used ones per window, by number.

    Args:
        hypers: those of each group, as the user has them now.
        update: :func:`step_batches` with the options of this step.
    """

    def __init__(
        self,
        grads: Sequence[GradShard],
        shards: Mapping[int, FileShard],
        hypers: Sequence[StepHypers],
        update: Callable[[Iterable[StepBatch]], None],
        windows: Iterable[tuple[FileWindow, Sequence[Segment]]],
        buffers: Sequence[Buffer],
        disk: Disk,
    ) -> None:
        self.buckets = [*used_params(grads)]
        self.segments: dict[int, list[Segment]] = {}
        self._hypers, self._step = hypers, update
        self._used: dict[int, tuple[FileShard, list[int]]] = {}
        self.used = self._used.values()
        self._grads: dict[tuple[int, int], Tensor] = {}
        self._numbers: dict[tuple[int, int], float] = {}
        self._following: set[tuple[int, int]] = set()
        self._dropped: set[tuple[int, int]] = set()
        for grad_shard in grads:
            shard, positions = shards[grad_shard.bucket], grad_shard.with_grad
            if positions:
                self._used[grad_shard.bucket] = (shard, positions)
            for position, number in zip(positions, shard.next_steps(positions), strict=True):
                grad, key = grad_shard.grads[position], (shard.index, position)
                assert grad is not None
                self._grads[key] = shard.flat_grad(position, grad)
                self._numbers[key] = number
                if shard.to_read(position):
                    self._following.add(key)
        used = []
        for window, parts in windows:
            stepped = [part for part in parts if part.slice_key in self._grads]
            if stepped:
                self.segments[window.number] = stepped
                used.append(window)
        self.windows = WindowPass(used, buffers, disk)

    def follow(self) -> None:
        """Take all writes to parameters so far as known: they are what this step begins from, or its own.

        But for those of :meth:`keep_edits`.
        """
        for bucket, (shard, positions) in self._used.items():
            for position in positions:
                if (bucket, position) not in self._dropped:
                    shard.follow(position)

    def left(self) -> list[Segment]:
        """What has not been stepped yet."""
        return [part for window in self.windows.unchanged for part in self.segments[window.number]]

    # -- a window -----------------------------------------------------------------------------------------------------

    def change(self, window: FileWindow, arrays: dict[str, Tensor]) -> Callable[[], None]:
        """Step a window. Return what brings the result into the parameters, which are not written before."""
        parts = self.segments[window.number]
        stepped = [self._arrays(part, arrays) for part in parts]
        names = [part.shard.flats[part.position].label for part in parts]
        check_apart([(f"param of {name}", self._param(part)) for name, part in zip(names, parts, strict=True)])
        batches: dict[tuple[int, int], StepBatch] = {}
        for part, own, name in zip(parts, stepped, names, strict=True):
            group, gradients = part.shard.bucket.layout.group, part.shard.gradients[part.position]
            hypers = self._hypers[group].for_mean_of(gradients)
            batches.setdefault((group, gradients), (hypers, []))[1].append(self._bound(part, own, name))
        self._step(batches.values())
        return partial(self._land, parts, [own.get("out", own["param"]) for own in stepped])

    def _land(self, parts: Sequence[Segment], results: Sequence[Tensor]) -> None:
        """Copy results to the parameters, but for those that the user has changed since the step failed."""
        with own_writes([part.shard.flats[part.position] for part in parts]):
            for part, result in zip(parts, results, strict=True):
                if part.slice_key not in self._dropped:
                    self._param(part).copy_(result)

    def _param(self, part: Segment) -> Tensor:
        """The parameter's elements, (part numel,)."""
        return part.shard.param_run(part.position)[part.at]

    def _arrays(self, part: Segment, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a step writes of a part, by the kernel's names: the state, and no memory of the parameter."""
        shard, target = part.shard, self._param(part)
        state = {role: arrays[role][span_of(role, part.where)] for role in state_dtypes(shard.form, shard.roles)}
        if shard.splits or shard.direct:
            return {"param": target.to(HOST, copy=True), **state}
        master = arrays["master"][part.where]
        if part.slice_key in self._following:
            follow_param(master, target)
        if shard.param_dtype is torch.float32:
            return {"param": master, **state}
        return {"param": master, **state, "out": torch.empty_like(target, device=HOST)}

    def _bound(self, part: Segment, arrays: Mapping[str, Tensor], name: str) -> BoundRun:
        """Return the run of a part, with its gradient, after checks of both."""
        grad = self._grads[part.slice_key][part.at].to(HOST)
        grad = grad if grad.dtype in GRAD_DTYPES else grad.float()
        check_arrays(name, arrays, part.shard.roles)
        check_tensor(f"grad of {name}", grad, arrays["param"].shape, GRAD_DTYPES)
        run = BoundRun(arrays, grad.dtype, step=self._numbers[part.slice_key])
        run.set_grad(grad)
        return run

    # -- the end ------------------------------------------------------------------------------------------------------

    def count(self) -> None:
        """Count the step, once, however often this is called."""
        for bucket, (shard, positions) in self._used.items():
            shard.count_step(positions, [self._numbers[bucket, position] for position in positions])

    def store(self, bucket: int) -> None:
        """Bring what was stepped in mirrors of a bucket's parameters into those."""
        if bucket in self._used:
            shard, positions = self._used[bucket]
            flats = [shard.flats[position] for position in positions]
            with uninterrupted(), own_writes(flats):
                for flat in flats:
                    flat.store()

    def keep(self) -> None:
        """The step has failed: let it outlive the backward that gave the gradients, and be seen as far as it went."""
        self.follow()
        self._grads = {key: self._grads[key].clone() for key in {part.slice_key for part in self.left()}}
        for bucket in self._used:
            self.store(bucket)

    def keep_edits(self) -> None:
        """Parameters that the user has changed keep that, and miss the update; their moments do not."""
        for bucket, (shard, positions) in self._used.items():
            self._dropped |= {(bucket, position) for position in positions if shard.edited(position)}
