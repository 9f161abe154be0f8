"""The exchange of a group of one rank: the mean is the gradient, and every parameter is where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .exchange import BucketReduction, Exchange, Ident, ParamRuns, StagingPool, copy_all, nothing_left


class AloneExchange(Exchange):
    """The exchange of a rank alone, which copies gradients to shards and gathers nothing.

    Args:
        blocks: as of :class:`Exchange`. Work in host memory belongs on the background thread too, in order with the
            rest.
    """

    way = ""

    def __init__(self, pool: StagingPool, *, blocks: bool) -> None:
        super().__init__(pool)
        self.blocks = blocks

    def reduce_runs(self, reduction: BucketReduction) -> bool:
        targets, sources = [], []
        for run in reduction.runs:
            target = reduction.out[run.start : run.start + run.numel]
            if run.values is None:
                if not run.add:
                    target.zero_()
            elif run.add:
                target.add_(run.values)
            else:
                targets.append(target)
                sources.append(run.values)
        copy_all(targets, sources)
        return True

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:  # noqa: ARG002
        return nothing_left

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        return lambda: [0] if self._failed_step == step else []
