"""The placement of a shard whose state lies in a file and is stepped a window at a time."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...errors import StorageFailed, ZeroOptError
from ...kernels.threads import checked_threads
from ...policies import NVMeOffload
from ...reduction.interface import GradShard
from ...sharding.buckets import GradBucket
from ...system.interrupts import uninterrupted
from ...system.log import log
from ...system.shared_memory import memory_errors, require_memory
from ..native_placement import NativePlacement
from ..state_shard import Kept
from .extents import Extent, FileShard, Segment, extents_of
from .state_file import StateFile
from .step import FileStep, step_batches
from .window_pass import BUFFERS, Buffer, Disk, FileWindow


class NVMePlacement(NativePlacement[FileShard, FileStep]):
    """A shard whose state lies in a file, and is stepped a window at a time while others are read and written.

    A step that a disk's failure interrupts stays pending, with parameters and state partly stepped; :meth:`bring_in`
    takes it up where it stopped, as :mod:`window_pass` promises. Its gradients are copied when it fails.
    """

    _policy_name = "NVMeOffload"
    _cause = ", since the disk failed in it"

    def __init__(self, policy: NVMeOffload, defaults: Mapping[str, Any], kept: Kept, threads: int | None) -> None:
        super().__init__(kept)
        self._threads, self._flush_denormals = threads, bool(defaults.get("flush_denormals", False))
        self._window_bytes = policy.window_mb * 2**20
        self._disk = Disk(StateFile(policy.path), policy.hang_timeout)
        self._moved = self._disk.totals()  # at the end of the last step
        self._pid = os.getpid()
        self._extents: list[Extent] = []
        self._windows: list[tuple[FileWindow, list[Segment]]] = []
        self._buffers: list[Buffer] = []

    # -- what there is ------------------------------------------------------------------------------------------------

    def add(self, buckets: Sequence[GradBucket]) -> None:
        added = extents_of(buckets, self._kept)
        self._extend([*self._extents, *added])
        self._register(shard for extent in added for _, shard in extent.shards)

    def drop(self, buckets: Sequence[GradBucket]) -> None:
        super().drop(buckets)
        self._extend([extent for extent in self._extents if extent.shards[0][1].index in self._shards])

    def _extend(self, extents: list[Extent]) -> None:
        """Give all arrays of these a place that have none yet, and forget what else there is."""
        start = max((extent.end for extent in extents), default=0)
        missing = [(extent, extent.missing(self._roles[extent.group])) for extent in extents]
        self._disk.file.reserve(start + sum(extent.nbytes_of(arrays) for extent, arrays in missing))
        for extent, arrays in missing:
            if arrays:
                extent.place(arrays, self._disk.file, start)
                start += extent.nbytes_of(arrays)
        if self._kept.first and any(arrays for _, arrays in missing):
            self._disk.file.sync()
        windows: list[tuple[FileWindow, list[Segment]]] = []
        for extent in extents:
            windows += extent.windows(self._window_bytes, len(windows))
        largest = max((window.nbytes for window, _ in windows), default=-1)
        if largest > min((buffer.nbytes for buffer in self._buffers), default=-1):
            what = f"NVMeOffload with window_mb={self._window_bytes / 2**20:g}"
            require_memory(BUFFERS * largest, what, "set a smaller window_mb")
            with memory_errors(BUFFERS * largest, what):
                self._buffers = [Buffer(largest) for _ in range(BUFFERS)]
        self._extents, self._windows = extents, windows

    @property
    def staging_nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def threads(self) -> int:
        return checked_threads(self._threads)

    def figures(self) -> Mapping[str, float]:
        before, self._moved = self._moved, self._disk.totals()
        found: dict[str, float] = {}
        for way, (nbytes, seconds) in self._moved.items():
            moved, taken = nbytes - before[way][0], seconds - before[way][1]
            found[f"disk/{way}_bytes"] = float(moved)
            found[f"disk/{way}_GB_per_s"] = moved / taken / 1e9 if taken > 0 else 0.0
        return found

    def require_not_forked(self) -> None:
        if os.getpid() != self._pid:
            raise StorageFailed(
                "this process was forked from the one that made the optimizer, and may not touch its file; construct "
                "the optimizer in the process that steps it"
            )

    def _place_missing(self) -> None:
        self._extend(self._extents)

    def _written(self) -> None:
        self._disk.file.sync()
        self._tell_autograd()

    def _tell_autograd(self) -> None:
        """Views of an array share its version counter."""
        mapped = [array for extent in self._extents for array in extent.mapped.values()]
        if mapped:
            torch.autograd.graph.increment_version(mapped)

    def close(self) -> None:
        """Drop a pending step and close the file; state that the user still holds stays readable."""
        try:
            self._drop_pending()
            self._disk.file.close()
        except ZeroOptError as error:  # the file is closed once the transfer lets go of it
            log.warning("%s", error)
        finally:
            self._disk.close()
            self._windows, self._buffers = [], []

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        for _ in self.bring_in():
            pass
        settled = False
        for grad_shard in grads:
            shard = self._shards[grad_shard.bucket]
            settled |= shard.settle_halfway(grad_shard.with_grad)
            shard.roles = self._kept.update.roles(groups[shard.bucket.layout.group])
        if settled:
            self._written()
        hypers = [*map(self._kept.update.hypers, groups)]
        update = partial(
            step_batches, grad_scale=grad_scale, threads=self.threads, flush_denormals=self._flush_denormals
        )
        step = FileStep(grads, self._shards, hypers, update, self._windows, self._buffers, self._disk)
        with self._keeping(step):
            with uninterrupted():
                self._pending = step
                step.follow()
            yield from self._run(step)

    @contextmanager
    def _keeping(self, step: FileStep) -> Iterator[None]:
        """Let a step that fails within the context outlive it, once it is pending."""
        try:
            yield
        except BaseException:
            with uninterrupted():
                if self._pending is step:
                    step.keep()
            raise

    def wait(self) -> None:
        """Wait for reads and writes that are under way, and begin no other."""
        if self._pending is not None:
            self._pending.windows.drain()

    def require_writable(self) -> None:
        """Read all state, and mark it to be written back; raise StorageFailed where that is impossible."""
        for extent in self._extents:
            extent.require_writable(self._disk.file)

    def bring_in(self) -> Iterator[int]:
        self._load_mirrors()
        if self._pending is not None:
            self._pending.keep_edits()
            with self._keeping(self._pending):
                yield from self._run(self._pending)

    def _run(self, step: FileStep) -> Iterator[int]:
        """Take what is left of a step, and yield buckets as they are updated."""
        left = Counter(part.shard.index for part in step.left())
        buckets = deque(step.buckets)
        for window in step.windows.run(step.change):
            left.subtract(part.shard.index for part in step.segments[window.number])
            while buckets and not left[buckets[0]]:
                step.store(buckets[0])
                yield buckets.popleft()
        with uninterrupted():
            step.count()
            for bucket in buckets:
                step.store(bucket)
            self._pending = None
        self._tell_autograd()
        yield from buckets
