"""Where shards of state lie in the file: arrays of several shards in a row, and windows over them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.adam_state import role_numel, span_of, state_dtypes
from ...kernels.runs import BLOCK_NUMEL
from ...sharding.buckets import GradBucket
from ...system.devices import is_host
from ...system.readable_pages import require_readable, require_writable
from ..memory import HOST_MEMORY, NVME, Tally, state_kind
from ..state_shard import Kept, StateShard
from .state_file import BLOCK_BYTES, StateFile
from .window_pass import FilePart, FileWindow

# Bytes that are asked about at a time, whole blocks.
_ASKED_BYTES = 4 * 2**20
# Beside the first read of a pass, and the last write, nothing else happens: an extent has at least so many windows,
# unless they would be smaller than a disk takes at its full speed.
_LEAST_WINDOWS, _SMALL_WINDOW_BYTES = 16, 4 * 2**20


def array_nbytes(role: str, dtype: torch.dtype, numel: int) -> int:
    """Bytes of so many elements of an array."""
    return role_numel(role, numel) * dtype.itemsize


class FileShard(StateShard):
    """A shard whose arrays are views of the file.

    Attributes:
        index: of the bucket.
        direct: parameters are in host memory, and stepped in place: they are in fp32, their own masters, or half of
            split ones.
    """

    def __init__(self, bucket: GradBucket, kept: Kept) -> None:
        super().__init__(bucket, kept)
        self.index = bucket.layout.index
        self.direct = (self.param_dtype is torch.float32 or self.splits) and is_host(bucket.device)

    def dtypes(self, roles: Sequence[str]) -> dict[str, torch.dtype]:
        """The arrays that a step with ``roles`` of the update's needs, by role."""
        master = {} if self.direct or self.splits else {"master": torch.float32}
        return {**state_dtypes(self.form, roles), **master}

    def master(self, position: int) -> Tensor:
        return self.param_run(position) if self.direct or self.splits else super().master(position)

    def read_params(self, positions: Sequence[int]) -> None:
        for position in filter(self.edited, positions):
            require_writable(self.master(position))
        super().read_params(positions)

    def settle_halfway(self, positions: Collection[int]) -> bool:
        for position in self._halfway.keys() & positions:
            require_writable(self._slice("remainder", position))
        return super().settle_halfway(positions)

    def load(self, position: int, saved: Mapping[str, Any]) -> None:
        """Replace the state of a slice.

        Raises:
            StorageFailed: the file cannot be written there; nothing of the slice was.
        """
        for role in self._arrays:
            require_writable(self._slice(role, position))
        super().load(position, saved)

    def fill_new(self, roles: Collection[str]) -> None:
        """As for any shard.

        Raises:
            StorageFailed: the file cannot be written there.
        """
        for role in roles if self._first else ():
            require_writable(self._arrays[role])
        super().fill_new(roles)

    def saved_master(self, position: int, master: Tensor) -> Tensor:
        if self.rewritten(position):  # it is read here
            require_readable(self.master(position))
        return super().saved_master(position, master)

    def bind(self, arrays: dict[str, Tensor]) -> None:
        """Make the views anew over these arrays, (shard numel,) each."""
        self._arrays = arrays
        self._renew_views()


class Segment(NamedTuple):
    """The part of a slice that lies in a window, in elements.

    Attributes:
        where: in the window's arrays. at: in the slice.
    """

    shard: FileShard
    position: int
    where: slice
    at: slice

    @property
    def slice_key(self) -> tuple[int, int]:
        """Index of the bucket, position in it."""
        return self.shard.index, self.position


class Extent:
    """Shards whose state has the same arrays, and is read and written together: a window may go over several.

    An array has the elements of all shards, in their order, so that a shard's part of it is one run. All arrays are cut
    alike: between units of as many elements as have whole blocks of the file in each.

    Attributes:
        shards: with the element that each begins at in every array. group: number of their param group.
        dtypes: of arrays that have a place, by role. starts: where in the file each begins. mapped: its bytes, of which
            all views of state are views.
    """

    def __init__(self, shards: Sequence[FileShard]) -> None:
        self.group = shards[0].bucket.layout.group
        *begins, numel = accumulate((shard.bucket.shard_numel for shard in shards), initial=0)
        self.shards = list(zip(begins, shards, strict=True))
        every = self.shards[0][1].dtypes(self.shards[0][1].update.arrays)
        self._unit = next(
            count
            for count in (BLOCK_BYTES >> 2, BLOCK_BYTES >> 1, BLOCK_BYTES, BLOCK_BYTES * BLOCK_NUMEL >> 1)
            if all(array_nbytes(role, dtype, count) % BLOCK_BYTES == 0 for role, dtype in every.items())
        )
        self._numel = -(-numel // self._unit) * self._unit
        self.dtypes: dict[str, torch.dtype] = {}
        self.starts: dict[str, int] = {}
        self.mapped: dict[str, Tensor] = {}

    def missing(self, roles: Sequence[str]) -> dict[str, torch.dtype]:
        """The arrays that a step with ``roles`` of the update's needs and that have no place yet."""
        wanted = self.shards[0][1].dtypes(roles)
        return {role: dtype for role, dtype in wanted.items() if role not in self.starts}

    def nbytes_of(self, arrays: Mapping[str, torch.dtype]) -> int:
        """Bytes that arrays have in the file."""
        return sum(array_nbytes(role, dtype, self._numel) for role, dtype in arrays.items())

    def place(self, arrays: Mapping[str, torch.dtype], file: StateFile, start: int) -> None:
        """Give arrays their places, reserved already, from byte ``start`` of the file on."""
        for role, dtype in arrays.items() if self._numel else ():
            nbytes = array_nbytes(role, dtype, self._numel)
            self.dtypes[role], self.starts[role], self.mapped[role] = dtype, start, file.view(start, nbytes)
            start += nbytes
        empty = {role: torch.empty(0, dtype=dtype, device="cpu") for role, dtype in arrays.items()}
        for at, shard in self.shards:
            where = slice(at, at + shard.bucket.shard_numel)
            bound = {role: array.view(self.dtypes[role])[span_of(role, where)] for role, array in self.mapped.items()}
            shard.bind(bound or empty)
            shard.fill_new(arrays)

    def require_writable(self, file: StateFile) -> None:
        """Raise StorageFailed unless all arrays can be written to, as :meth:`StateFile.require_writable` does."""
        for role, array in self.mapped.items():
            for start in range(0, array.numel(), _ASKED_BYTES):
                file.require_writable(self.starts[role] + start, array[start : start + _ASKED_BYTES])

    @property
    def end(self) -> int:
        """Where in the file the last array ends."""
        return max((start + self.mapped[role].numel() for role, start in self.starts.items()), default=0)

    def add_memory(self, tally: Tally, arrays: Mapping[str, torch.dtype]) -> None:
        """Add what the file will hold of these arrays: whole blocks, the last of which padding fills up."""
        shards = [shard for _, shard in self.shards]
        numels = [piece.in_param.numel for shard in shards for piece in shard.pieces]
        for role, dtype in arrays.items():
            owned = sum(array_nbytes(role, dtype, numel) for numel in numels)
            tally[state_kind(role), NVME, role] += owned
            tally["buffers", NVME, "padding"] += array_nbytes(role, dtype, self._numel) - owned
        if shards[0].update.counts:
            tally["state", HOST_MEMORY, "step"] += sum(shard.steps.nbytes for shard in shards)

    def _window_numel(self, most_nbytes: float, arrays: Mapping[str, torch.dtype]) -> int:
        """Elements of a window of at most so many bytes, and fewer of a small extent: whole units, at least one."""
        each = sum(array_nbytes(role, dtype, self._unit) for role, dtype in arrays.items())
        if not each:  # nothing is kept: SGD without momentum
            return self._numel
        share = max(self.nbytes_of(arrays) // _LEAST_WINDOWS, _SMALL_WINDOW_BYTES)
        return min(max(int(min(most_nbytes, share)) // each, 1) * self._unit, self._numel)

    def window_nbytes(self, most_nbytes: float, arrays: Mapping[str, torch.dtype]) -> int:
        """Bytes of the largest window, of all arrays."""
        numel = self._window_numel(most_nbytes, arrays)
        return sum(array_nbytes(role, dtype, numel) for role, dtype in arrays.items())

    def copied_nbytes(self, most_nbytes: float, arrays: Mapping[str, torch.dtype]) -> int:
        """Bytes that a step makes beside the largest window: results, two at a time, and copies from an accelerator.

        fp32 results there are the masters. What is copied from there is gradients.
        """
        shard, numel = self.shards[0][1], self._window_numel(most_nbytes, arrays)
        apart = shard.direct or shard.splits or shard.param_dtype is not torch.float32
        grads = 0 if is_host(shard.bucket.device) else shard.bucket.shard_dtype.itemsize
        return numel * (2 * apart * shard.param_dtype.itemsize + grads)

    def windows(self, most_nbytes: float, number: int) -> Iterator[tuple[FileWindow, list[Segment]]]:
        """All windows, numbered from ``number`` on, with the parts of slices in them."""
        if not self._numel:
            return
        step = self._window_numel(most_nbytes, self.dtypes)
        segments = self._segments(step)
        for start in range(0, self._numel, step):
            numel = min(step, self._numel - start)
            parts = {
                role: FilePart(
                    self.starts[role] + array_nbytes(role, dtype, start), array_nbytes(role, dtype, numel), dtype
                )
                for role, dtype in self.dtypes.items()
            }
            yield FileWindow(number, parts), segments.get(start // step, [])
            number += 1

    def _segments(self, step: int) -> dict[int, list[Segment]]:
        """Per window of so many elements, the parts of slices in it."""
        by_window: dict[int, list[Segment]] = {}
        for at, shard in self.shards:
            for position, piece in enumerate(shard.pieces):
                start, stop = at + piece.in_shard.start, at + piece.in_shard.stop
                for window in range(start // step, -(-stop // step)):
                    first, last = max(start, window * step), min(stop, (window + 1) * step)
                    where = slice(first - window * step, last - window * step)
                    if first < last:
                        part = Segment(shard, position, where, slice(first - start, last - start))
                        by_window.setdefault(window, []).append(part)
        return by_window


def extents_of(buckets: Sequence[GradBucket], kept: Kept) -> list[Extent]:
    """Neighbouring buckets of a group whose state has the same arrays, together."""
    shards = (FileShard(bucket, kept) for bucket in buckets)
    every = kept.update.arrays
    alike = groupby(shards, lambda shard: (shard.bucket.layout.group, shard.direct, shard.dtypes(every)))
    return [Extent(list(shards)) for _, shards in alike]
