"""Sums of squares of shards for the norm, and the look for non-finite gradients, taken while a shard is reduced.

The exchange has a shard in the cache when it writes it; ``step()`` would have to bring it from memory again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.exchange import SliceSums
from ..kernels import sums_of
from ..sharding.buckets import GradBucket
from ..system.extension import native


class ShardSquares:
    """A :class:`ShardReader` that has squares added up where the last step asked for them.

    While backward runs, its methods are called on the exchange thread; otherwise, with nothing under way, on the main
    thread. Sums in which subnormal numbers may count as zero (``torch.set_flush_denormal``) are not taken, nor given.
    """

    def __init__(self) -> None:
        self._places: dict[int, list[SliceSums]] = {}
        self._taken: set[int] = set()
        self._known: set[int] = set()
        self._asked = self._scaled = False  # since the last step
        self._takes = False

    def sums(self, bucket: GradBucket) -> Sequence[SliceSums]:
        if not self._takes or native.flushes_denormals():
            return ()
        index = bucket.layout.index
        if index not in self._places:
            self._places[index] = [
                SliceSums(start, stop - start, torch.empty(sums_of(stop - start), dtype=torch.float64, device="cpu"))
                for start, stop in (piece.in_shard for piece in bucket.slices)
            ]
        self._taken.add(index)
        return self._places[index]

    def reduced(self, bucket: GradBucket) -> None:
        if bucket.layout.index in self._taken:
            self._known.add(bucket.layout.index)

    def rewrites(self, bucket: GradBucket) -> None:
        self._taken.discard(bucket.layout.index)
        self._known.discard(bucket.layout.index)

    def scales(self, bucket: GradBucket, factor: float) -> None:  # noqa: ARG002  (see ShardReader)
        self._scaled = True
        self.rewrites(bucket)

    def squares(self, bucket: GradBucket) -> Sequence[Tensor | None]:
        # Of gradients that are unscaled first no sums could be used.
        self._asked = self._asked or not self._scaled
        if bucket.layout.index not in self._known or native.flushes_denormals():
            return [None] * len(bucket.slices)
        return [place.squares for place in self._places[bucket.layout.index]]

    def stepped(self) -> None:
        """The next step begins."""
        self._takes, self._asked, self._scaled = self._asked, False, False
        self._known.clear()  # an optimizer may write to the gradients that it steps with
