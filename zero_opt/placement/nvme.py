"""The shard's state lies in a file, and is stepped a window at a time while others are read and written."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..buckets import GradBucket
from ..cpu_adam.update import hypers_of as adam_hypers
from ..errors import StepPending, StorageFailed, UnsupportedOptimizer, ZeroOptError
from ..flat_param import share_counters
from ..policies import NVMeOffload
from ..reduction.base import GradShard
from ..shared_memory import require_memory
from .base import ParamState, Stretch
from .native_rules import say_without_masters
from .nvme_extent import Extent, FileShard, Segment, extents_of
from .nvme_file import StateFile
from .nvme_pass import BUFFERS, Buffer, Disk, Window
from .nvme_step import FileStep, Hypers

_log = logging.getLogger("zero_opt")


class NVMePlacement:
    """See the module and :class:`Placement`.

    A step that a disk's failure interrupts stays pending, with parameters and state partly stepped; :meth:`land`
    takes it up where it stopped, as :mod:`nvme_pass` promises. Its gradients are copied when it fails.
    """

    spare_nbytes = 0

    def __init__(self, policy: NVMeOffload, defaults: Mapping[str, Any]) -> None:
        self._threads, self._flush_denormals = policy.threads, bool(defaults.get("flush_denormals", False))
        self._window_bytes = policy.window_mb * 2**20
        self._disk = Disk(StateFile(policy.path), policy.hang_timeout)
        self._pid = os.getpid()
        self._amsgrad: list[bool] = []
        self._extents: list[Extent] = []
        self._shards: dict[int, FileShard] = {}
        self._places: dict[int, tuple[FileShard, int]] = {}
        self._windows: list[tuple[Window, list[Segment]]] = []
        self._buffers: list[Buffer] = []
        self._pending: FileStep | None = None

    # -- what there is ------------------------------------------------------------------------------------------------

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        """See :class:`Placement`."""
        self._amsgrad.append(bool(hypers["amsgrad"]))

    def drop_groups(self, kept: int) -> None:
        """See :class:`Placement`."""
        del self._amsgrad[kept:]

    def add(self, buckets: Sequence[GradBucket]) -> None:
        """See :class:`Placement`.

        Raises:
            StorageFull, StorageFailed: there is no room for them; nothing was taken in.
        """
        if not buckets:
            return
        first = buckets[0].layout.index
        # What another rank could not take in was dropped again, and is planned anew.
        kept = [extent for extent in self._extents if extent.shards[0][1].index < first]
        known = [flat for extent in kept for _, shard in extent.shards for flat in shard.bucket.params]
        share_counters(known, [flat for bucket in buckets for flat in bucket.params])
        self._extend([*kept, *extents_of(buckets)])
        self._shards = {shard.index: shard for extent in self._extents for _, shard in extent.shards}
        self._places = {
            piece.param: (shard, at) for shard in self._shards.values() for at, piece in enumerate(shard.pieces)
        }

    def _extend(self, extents: list[Extent]) -> None:
        """Give all arrays of these a place that have none yet, and forget what else there is."""
        start = max((extent.end for extent in extents), default=0)
        missing = [(extent, extent.missing(amsgrad=self._amsgrad[extent.group])) for extent in extents]
        self._disk.file.reserve(start + sum(extent.nbytes * len(roles) for extent, roles in missing))
        for extent, roles in missing:
            if roles:
                extent.place(roles, self._disk.file, start)
                start += extent.nbytes * len(roles)
        windows: list[tuple[Window, list[Segment]]] = []
        for extent in extents:
            windows += extent.windows(self._window_bytes, len(windows))
        largest = max((window.total_nbytes for window, _ in windows), default=0)
        if largest > min((buffer.nbytes for buffer in self._buffers), default=0):
            require_memory(BUFFERS * largest, f"NVMeOffload with window_mb={self._window_bytes / 2**20:g}")
            self._buffers = [Buffer(largest) for _ in range(BUFFERS)]
        self._extents, self._windows = extents, windows

    @property
    def staging_nbytes(self) -> int:
        """See :class:`Placement`."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def require_own(self) -> None:
        """See :class:`Placement`."""
        if os.getpid() != self._pid:
            raise StorageFailed(
                "this process was forked from the one that made the optimizer, and may not touch its file; construct "
                "the optimizer in the process that steps it"
            )

    def repoint(self, params: Sequence[int]) -> None:
        """See :class:`Placement`."""
        for index in params:
            if index in self._places:
                shard, position = self._places[index]
                shard.repoint(position)

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[int, ParamState]]:
        """See :class:`Placement`. Tensors are views of the file, of which nothing is read before they are."""
        for index, (shard, position) in self._places.items():
            if position in shard.stepped:
                yield index, shard.state(position)

    def saved(self) -> Iterator[tuple[int, ParamState]]:
        """See :class:`Placement`; it is plain."""
        return self.state()

    def resident(self) -> Iterator[Tensor]:
        """See :class:`Placement`; none is."""
        return iter(())

    def adopt(self, index: int, state: ParamState | None) -> bool:
        """See :class:`Placement`. Values are copied to the file."""
        shard, position = self._places[index]
        if state is not None and not shard.replaced(position, state):
            return False
        if self._pending is not None:
            raise StepPending(
                f"the state of {shard.flats[position].label} was replaced while a step for it was pending; call "
                "opt.flush() before that"
            )
        saved = {} if state is None else dict(state)
        shard.forget_views(position)
        shard.load(position, saved)
        self._written()
        return True

    def param_of(self, index: int) -> Tensor:
        """See :class:`Placement`."""
        shard, position = self._places[index]
        return shard.flats[position].part(shard.pieces[position].in_param)

    def set_stretches(self, index: int, stretches: Sequence[Stretch]) -> None:
        """See :class:`Placement`."""
        shard, position = self._places[index]
        shard.stretches[position] = stretches

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """See :class:`Placement`. A pending step is forgotten."""
        self._drop_pending()
        self._amsgrad = [bool(group["amsgrad"]) for group in groups]
        self._extend(self._extents)
        without = 0
        for index, (shard, position) in self._places.items():
            saved = states.get(index, {})
            shard.load(position, saved)
            without += bool(saved) and shard.param_dtype is not torch.float32 and "master" not in saved
        say_without_masters(without)
        self._written()

    def _written(self) -> None:
        """State was written to through its views."""
        self._disk.file.sync()
        self._tell_autograd()

    def _tell_autograd(self) -> None:
        """Views of an array share its version counter."""
        mapped = [array for extent in self._extents for array in extent.mapped]
        if mapped:
            torch.autograd.graph.increment_version(mapped)

    def close(self) -> None:
        """See :class:`Placement`. State that somebody still holds stays readable."""
        try:
            self._drop_pending()
            self._disk.file.close()
        except ZeroOptError as error:  # the file is closed once the transfer lets go of it
            _log.warning("%s", error)
        finally:
            self._disk.close()
            self._windows, self._buffers = [], []

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """See :class:`Placement`."""
        return self._pending is not None

    def landing(self, grads: Sequence[GradShard]) -> Sequence[int]:
        """See :class:`Placement`."""
        return [shard.bucket for shard in grads if shard.used]

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        """See :class:`Placement`."""
        for _ in self.land():
            pass
        self._pending = self._begun(grads, groups, grad_scale)
        yield from self._run(self._pending)

    def wait(self) -> None:
        """See :class:`Placement`. What is read or written at the moment ends; nothing more is begun."""
        if self._pending is not None:
            self._pending.windows.drain()

    def _drop_pending(self) -> None:
        self.wait()
        self._pending = None

    def land(self) -> Iterator[int]:
        """See :class:`Placement`."""
        # Whole buckets are gathered, so what is edited in a parameter that no step uses must be in its mirror.
        for shard in self._shards.values():
            for flat in shard.bucket.params:
                flat.load()
        if self._pending is not None:
            self._pending.keep_edits()
            yield from self._run(self._pending)

    def conflict(self) -> StepPending | None:
        """See :class:`Placement`."""
        for flat in () if self._pending is None else self._pending.edited():
            return StepPending(
                f"{flat.label} was changed while a step for it was pending, since the disk failed in it; call "
                "opt.flush() before changing parameters. A flush() after it keeps the change and drops the update"
            )
        return None

    def _begun(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> FileStep:
        """A step of which nothing has been done."""
        amsgrad = [bool(group["amsgrad"]) for group in groups]
        for found in grads:
            shard = self._shards[found.bucket]
            if amsgrad[shard.bucket.layout.group] and not shard.has_maximum():
                raise UnsupportedOptimizer("amsgrad cannot be switched on after its param group was added")
        hypers = [adam_hypers(group) for group in groups]
        step = FileStep(grads, self._shards, Hypers(hypers, amsgrad, grad_scale, self._threads, self._flush_denormals))
        step.plan(self._windows, self._buffers, self._disk)
        return step

    def _run(self, step: FileStep) -> Iterator[int]:
        """Take what is left of a step, and yield buckets as they are updated."""
        left = Counter(part.shard.index for part in step.left())
        buckets = iter(step.buckets)
        upcoming = next(buckets, None)
        try:
            for window in step.windows.run(step.change):
                left.subtract(part.shard.index for part in step.segments[window.number])
                while upcoming is not None and not left[upcoming]:
                    step.store(upcoming)
                    yield upcoming
                    upcoming = next(buckets, None)
        except BaseException:
            step.keep()
            raise
        step.count()
        self._pending = None
        self._tell_autograd()
        while upcoming is not None:
            step.store(upcoming)
            yield upcoming
            upcoming = next(buckets, None)
