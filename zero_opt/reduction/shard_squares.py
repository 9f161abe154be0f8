"""Sums of squares of a shard, for the norm and the look for non-finite gradients, taken while the shard is written.

The exchange, or a copy to a worker's arena, has it in the cache then; ``step()`` would have to bring it from memory
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.exchange import SliceSums
from ..kernels import sum_count
from ..sharding.buckets import GradBucket
from ..system.extension import native


class ShardSquares:
    """The :class:`ShardReader` of one bucket that has squares added up where the last step asked for them.

    While backward runs, its methods are called on the exchange thread; otherwise, with nothing under way, on the main
    thread. Sums in which subnormal numbers may count as zero (``torch.set_flush_denormal``) are not taken, nor given.
    """

    def __init__(self, bucket: GradBucket) -> None:
        numels = ((piece.in_shard.start, piece.in_shard.numel) for piece in bucket.slices)
        self._sums = [
            SliceSums(at, n, torch.empty(sum_count(n), dtype=torch.float64, device="cpu")) for at, n in numels
        ]
        self._adds_up = self._known = False
        self._asked = self._scaled = False  # since the last step

    def sums(self, bucket: GradBucket) -> Sequence[SliceSums]:  # noqa: ARG002  (of ShardReader)
        self._known = self._adds_up and not native.flushes_denormals()
        return self._sums if self._known else ()

    def reduced(self, bucket: GradBucket) -> None:
        """The sums are complete. If the round is not, its step raises before it asks for them."""

    def rewrites(self, bucket: GradBucket) -> None:  # noqa: ARG002  (of ShardReader)
        self._known = False

    def scales(self, bucket: GradBucket, factor: float) -> None:  # noqa: ARG002  (of ShardReader)
        self._known, self._scaled = False, True

    def squares(self, bucket: GradBucket) -> Sequence[Tensor | None]:  # noqa: ARG002  (of ShardReader)
        # A step that unscales gradients before it measures them could not use any sums.
        self._asked = self._asked or not self._scaled
        known = self._known and not native.flushes_denormals()
        return [part.squares if known else None for part in self._sums]

    def end_step(self) -> None:
        """Forget the sums, since an optimizer may write to the gradients that it steps with."""
        self._adds_up = self._asked
        self.forget()

    def forget(self) -> None:
        """Forget the sums, and what was asked since the last step."""
        self._known = self._asked = self._scaled = False
