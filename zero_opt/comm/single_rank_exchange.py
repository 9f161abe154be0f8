"""The exchange of a group of one rank: the mean is the gradient, and every parameter is where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .exchange import DirectExchange, Gathering, Ident, PooledExchange, Run, SliceSums, StagingPool, chunks_of


class AloneExchange(PooledExchange):
    """See the module.

    Args:
        blocks: see :class:`Exchange`; work in host memory belongs on the background thread too, in order with the rest.
    """

    def __init__(self, pool: StagingPool, *, blocks: bool) -> None:
        super().__init__(pool)
        self.blocks = blocks

    def direct(self, dtype: torch.dtype) -> DirectExchange:  # noqa: ARG002  (any)
        return self

    def reduce_runs(
        self,
        ident: Ident,  # noqa: ARG002
        runs: Sequence[Run],
        bounds: Sequence[int],  # noqa: ARG002
        out: Tensor,
        sums: Sequence[SliceSums] = (),  # noqa: ARG002
    ) -> bool:
        targets, sources = [], []
        for run in runs:
            target = out[run.start : run.start + run.numel]
            if run.values is None:
                if not run.add:
                    target.zero_()
            elif run.add:
                target.add_(run.values)
            else:
                targets.append(target)
                sources.append(run.values)
        if targets:
            torch._foreach_copy_(targets, sources)
        return True

    def gather_runs(self, ident: Ident, runs: Sequence[Run], bounds: Sequence[int]) -> Callable[[], None]:  # noqa: ARG002
        return _nothing_left

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:  # noqa: ARG002
        out.copy_(bucket)
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Gathering:  # noqa: ARG002
        return Gathering((), chunks_of(bucket, bounds))


def _nothing_left() -> None:
    """A gather that is complete already."""
