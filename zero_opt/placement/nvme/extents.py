"""Where shards of state lie in the file: arrays of several shards in a row, and windows over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.adam_state import MOMENTS
from ...sharding.buckets import GradBucket
from ...system.devices import is_host
from ...system.readable_pages import require_readable, require_writable
from ..adam_rules import state_keys
from ..adam_shard import StateShard
from ..memory import HOST_MEMORY, NVME, Tally
from .state_file import BLOCK_BYTES, StateFile
from .window_pass import FileWindow

# Bytes that are asked about at a time, whole blocks.
_ASKED_BYTES = 4 * 2**20
_BLOCK_NUMEL = BLOCK_BYTES // torch.float32.itemsize


class FileShard(StateShard):
    """A shard whose arrays are views of the file.

    Attributes:
        index: of the bucket.
        direct: parameters are in fp32 and in host memory, and stepped in place: they are their own masters.
    """

    def __init__(self, bucket: GradBucket) -> None:
        super().__init__(bucket)
        self.index = bucket.layout.index
        self.direct = self.param_dtype is torch.float32 and is_host(bucket.device)

    def master(self, position: int) -> Tensor:
        return self.param_run(position) if self.direct else super().master(position)

    def load(self, position: int, saved: Mapping[str, Any]) -> None:
        """Replace the state of a slice.

        Raises:
            StorageFailed: the file cannot be written there; nothing of the slice was.
        """
        for role in self._arrays:
            require_writable(self._slice(role, position))
        super().load(position, saved)

    def saved_master(self, position: int, master: Tensor) -> Tensor:
        if self.edited(position):  # it is read here
            require_readable(self.master(position))
        return super().saved_master(position, master)

    def bind(self, arrays: dict[str, Tensor]) -> None:
        """Make the views anew over these arrays, (shard numel,) each."""
        self._arrays = arrays
        self._renew_views()


class Segment(NamedTuple):
    """The part of a slice that lies in a window, in elements.

    Attributes:
        where: in the window's arrays. at: in the slice. steps: done, where that is known.
    """

    shard: FileShard
    position: int
    where: slice
    at: slice
    steps: float = 0.0

    def stretches(self) -> Iterator[Segment]:
        """What of it is stepped, each part at one step count."""
        for start, stop, count in self.shard.stretches_of(self.position):
            first, last = max(start, self.at.start), min(stop, self.at.stop)
            if first < last:
                where = slice(self.where.start + first - self.at.start, self.where.start + last - self.at.start)
                yield self._replace(where=where, at=slice(first, last), steps=count)

    @property
    def slice_key(self) -> tuple[int, int]:
        """Index of the bucket, position in it."""
        return self.shard.index, self.position


class Extent:
    """Shards whose state has the same arrays, and is read and written together: a window may go over several.

    An array has the elements of all shards, in their order, so that a shard's part of it is one run.

    Attributes:
        shards: with the element that each begins at in every array. group: number of their param group.
        starts: where in the file each array begins, by role. mapped: its bytes, of which all views of state are views.
    """

    def __init__(self, shards: Sequence[FileShard]) -> None:
        self.group = shards[0].bucket.layout.group
        *begins, numel = accumulate((shard.bucket.shard_numel for shard in shards), initial=0)
        self.shards = list(zip(begins, shards, strict=True))
        self.nbytes = -(-numel // _BLOCK_NUMEL) * BLOCK_BYTES  # of an array
        self.starts: dict[str, int] = {}
        self.mapped: dict[str, Tensor] = {}

    def missing(self, *, amsgrad: bool) -> list[str]:
        """The arrays that a step needs and that have no place yet."""
        master = [] if self.shards[0][1].direct else ["master"]
        return [role for role in (*state_keys(amsgrad=amsgrad), *master) if role not in self.starts]

    def place(self, roles: Sequence[str], file: StateFile, start: int) -> None:
        """Give arrays their places, reserved already, from byte ``start`` of the file on."""
        for role in roles if self.nbytes else ():
            self.starts[role], self.mapped[role] = start, file.view(start, self.nbytes)
            start += self.nbytes
        for at, shard in self.shards:
            where = slice(at, at + shard.bucket.shard_numel)
            arrays = {role: array.view(torch.float32)[where] for role, array in self.mapped.items()}
            shard.bind(arrays or dict.fromkeys((*MOMENTS, *roles), torch.empty(0, dtype=torch.float32, device="cpu")))

    def require_writable(self, file: StateFile) -> None:
        """Raise StorageFailed unless all arrays can be written to, as :meth:`StateFile.require_writable` does."""
        for role, array in self.mapped.items():
            for start in range(0, self.nbytes, _ASKED_BYTES):
                file.require_writable(self.starts[role] + start, array[start : start + _ASKED_BYTES])

    @property
    def end(self) -> int:
        """Where in the file the last array ends."""
        return max((start + self.nbytes for start in self.starts.values()), default=0)

    def add_memory(self, tally: Tally, roles: Sequence[str]) -> None:
        """Add what the file will hold of these arrays: whole blocks, the last of which padding fills up."""
        shards = [shard for _, shard in self.shards]
        owned = sum(piece.in_param.numel for shard in shards for piece in shard.pieces) * torch.float32.itemsize
        for role in roles:
            tally["masters" if role == "master" else "state", NVME, role] += owned
        tally["state", HOST_MEMORY, "step"] += sum(shard.steps.nbytes for shard in shards)
        tally["buffers", NVME, "padding"] += (self.nbytes - owned) * len(roles)

    def window_nbytes(self, most_nbytes: float, arrays: int) -> int:
        """Bytes of one array in a window of so many: whole blocks, at least one."""
        blocks = int(most_nbytes) // (BLOCK_BYTES * max(arrays, 1))
        return min(max(blocks, 1) * BLOCK_BYTES, self.nbytes)

    def windows(self, most_nbytes: float, number: int) -> Iterator[tuple[FileWindow, list[Segment]]]:
        """All windows, numbered from ``number`` on, with the parts of slices in them."""
        if not self.nbytes:
            return
        size = self.window_nbytes(most_nbytes, len(self.starts))
        step = size // torch.float32.itemsize
        segments = self._segments(step)
        for start in range(0, self.nbytes, size):
            nbytes = min(size, self.nbytes - start)
            starts = {role: first + start for role, first in self.starts.items()}
            yield FileWindow(number, starts, nbytes), segments.get(start // size, [])
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


def extents_of(buckets: Sequence[GradBucket]) -> list[Extent]:
    """Neighbouring buckets of a group whose state has the same arrays, together."""
    alike = groupby(map(FileShard, buckets), lambda shard: (shard.bucket.layout.group, shard.direct))
    return [Extent(list(shards)) for _, shards in alike]
