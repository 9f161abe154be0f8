"""After the step: every rank's updated shards to all ranks, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .buckets import GradBucket, StagingPool
from .collectives import Exchange, Pending
from .partition import Partition


class _Copies:
    """The copies between one bucket's staging buffer and its parameters."""

    def __init__(self, bucket: GradBucket, staging: Tensor, rank: int) -> None:
        self.staging = staging
        shard = bucket.layout.shard(rank)
        self.own_params: list[Tensor] = []
        self.own_staged: list[Tensor] = []
        self.other_params: list[Tensor] = []
        self.other_staged: list[Tensor] = []
        for flat, offset, numel in zip(bucket.params, bucket.layout.offsets, bucket.layout.numels, strict=True):
            start = min(max(shard.start - offset, 0), numel)
            stop = min(max(shard.stop - offset, start), numel)
            run = flat.flat
            for low, high, own in ((0, start, False), (start, stop, True), (stop, numel, False)):
                if low < high:
                    params, staged = (
                        (self.own_params, self.own_staged) if own else (self.other_params, self.other_staged)
                    )
                    params.append(run[low:high])
                    staged.append(staging[offset + low : offset + high])

    def stage(self) -> None:
        """Own slices into the buffer."""
        if self.own_params:
            torch._foreach_copy_(self.own_staged, self.own_params)

    def deliver(self) -> None:
        """The other ranks' slices into the parameters."""
        if self.other_params:
            torch._foreach_copy_(self.other_params, self.other_staged)


class ParamGather:
    """All-gathers buckets, one on the wire while the one before it is copied out."""

    def __init__(self, partition: Partition, exchanges: Mapping[str, Exchange], pool: StagingPool) -> None:
        self._partition, self._exchanges, self._pool = partition, exchanges, pool
        self._copies: dict[int, _Copies] = {}

    def forget(self) -> None:
        """Parameters were re-pointed: make the views anew."""
        self._copies.clear()

    def run(self, buckets: Iterable[GradBucket]) -> None:
        """Gather the given buckets, the same on every rank, in the same order. Collective."""
        under_way: tuple[GradBucket, _Copies, Pending] | None = None
        for turn, bucket in enumerate(buckets):
            copies = self._copies_of(bucket, turn % 2)
            copies.stage()
            exchange = self._exchanges[bucket.device.type]
            pending = exchange.all_gather(copies.staging, bucket.layout.bounds)
            if under_way is not None:
                self._finish(*under_way)
            under_way = (bucket, copies, pending)
        if under_way is not None:
            self._finish(*under_way)

    def _finish(self, bucket: GradBucket, copies: _Copies, pending: Pending) -> None:
        pending.wait()
        copies.deliver()
        for flat in bucket.params:
            flat.store()

    def _copies_of(self, bucket: GradBucket, slot: int) -> _Copies:
        dtype = bucket.params[0].param.dtype
        staging = self._pool.take(slot, bucket.layout.numel, dtype, bucket.device)
        copies = self._copies.get(bucket.layout.index)
        if copies is None or copies.staging.data_ptr() != staging.data_ptr():
            copies = self._copies[bucket.layout.index] = _Copies(bucket, staging, self._partition.rank)
        return copies
