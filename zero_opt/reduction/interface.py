"""The seam between gradients and the step: what every reduction hands on, and what it is built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ..comm.agreement import Agreement, StepAgreement
from ..comm.exchange import Exchange, Ident, StagingPool
from ..comm.pieces import REDUCTION
from ..errors import ZeroOptError
from ..layout import ParamSlice, indices_of
from ..sharding.buckets import Fill, GradBucket
from ..sharding.partition import Partition
from ..system.background_thread import SerialThread
from ..system.future import Future
from ..system.phases import Phase
from ..system.stages import Lane

# Global indices of parameters, by the index of their bucket.
ParamsByBucket: TypeAlias = Mapping[int, Collection[int]]


class GradShard(NamedTuple):
    """This rank's part of one bucket's reduced gradient.

    Attributes:
        bucket: index of the bucket. slices: this rank's parameter slices in it.
        grads: one per slice of this rank, in slice order: in the parameter's shape where the slice is whole, else 1-D;
            ``None`` where no rank used the parameter.
        used: global indices of the bucket's parameters of which any rank has a gradient.
    """

    bucket: int
    slices: Sequence[ParamSlice]
    grads: Sequence[Tensor | None]
    used: Collection[int]

    @property
    def with_grad(self) -> list[int]:
        """Positions of the slices that have a gradient."""
        return [position for position, grad in enumerate(self.grads) if grad is not None]


def used_params(grads: Iterable[GradShard]) -> ParamsByBucket:
    """Return the parameters of which any rank has a gradient."""
    return {shard.bucket: shard.used for shard in grads if shard.used}


def merged(*parts: ParamsByBucket) -> ParamsByBucket:
    """Return the parameters that are in any of these, buckets in the order in which they come first."""
    buckets = dict.fromkeys(chain(*parts))
    return {bucket: {*chain(*(part.get(bucket, ()) for part in parts))} for bucket in buckets}


@dataclass
class StepCount:
    """Where training is. The engine alone writes to it.

    Attributes:
        step: optimizer steps done. epoch: ``zero_grad`` calls since the last step.
    """

    step: int = 0
    epoch: int = 0


class OwnRounds(NamedTuple):
    """What one rank has had of the window's rounds: its reduction's part of :class:`StepReport`.

    Attributes:
        rounds: exchanges of every bucket since the last :meth:`GradReduction.collect`.
        error: what went wrong on this rank; every rank raises it.
        restarted: parameters whose gradient was dropped or zeroed though part of a sum.
        abandoned, sample: see :class:`StepReport`.
    """

    rounds: int
    error: ZeroOptError | None
    restarted: Collection[int] = ()
    abandoned: int = 0
    sample: bytes = b""


class SealedRound(NamedTuple):
    """A round of a bucket that takes no gradient any more; see :meth:`GradBucket.reduce`."""

    bucket: GradBucket
    fill: Fill
    ident: Ident
    accumulate: Sequence[bool]


@dataclass
class ReductionParts:
    """What a reduction works with.

    Attributes:
        count: where training is; the reductions read it.
        exchanges: by device type.
        thread: runs everything that exchanges with other ranks off the main thread, in one order.
        all_params: every parameter of the optimizer by global index, planned or not.
        unscale: the engine's :meth:`~zero_opt.optimizer.sharded.ShardedEngine.unscale`, for GradScaler.
    """

    partition: Partition
    agreement: Agreement
    count: StepCount
    exchanges: Mapping[str, Exchange]
    thread: SerialThread
    all_params: Sequence[Tensor]
    unscale: Callable[[Tensor], bool]
    pool: StagingPool = field(default_factory=StagingPool)

    def exchange_of(self, bucket: GradBucket) -> Exchange:
        """Return the exchange that carries a bucket."""
        return self.exchanges[bucket.device.type]

    def occupies_core(self, bucket: GradBucket) -> bool:
        """Return whether ranks exchange a bucket by loops of their own, matched by name, not by order."""
        exchange = self.exchange_of(bucket)
        several = self.partition.world_size > 1
        return several and exchange.blocks and not exchange.overlaps and not self.must_match

    def reduce_here(self, sealed: SealedRound) -> bool:
        """Reduce a round on the calling thread; see :meth:`GradBucket.reduce`."""
        bucket, fill, ident, accumulate = sealed
        with Phase(REDUCTION):
            return bucket.reduce(fill, ident, accumulate, self.exchange_of(bucket), self.pool)

    def reduce(self, sealed: SealedRound) -> Future[bool]:
        """Reduce a round: on the background thread if the exchange blocks, else here and now.

        An exchange that does not block raises its error here: a collective that was not enqueued must not count as one.
        """
        bucket, fill, ident, accumulate = sealed
        exchange = self.exchange_of(bucket)
        lane = bucket.lane(exchange)
        if lane is not None:  # stages are labeled where they are run
            arguments = (fill, ident, accumulate, exchange, self.pool)
            return self.thread.submit_stages(Lane(REDUCTION, lane), bucket.reduce_in_stages, *arguments)
        if exchange.blocks:
            return self.thread.submit(self.reduce_here, sealed)
        done: Future[bool] = Future()
        done.set_result(self.reduce_here(sealed))
        return done

    def reduce_zeros(self, buckets: Iterable[GradBucket]) -> None:
        """Reduce rounds of which no rank reads the result; see [Note: abandoned rounds] in round_matching.py."""
        for bucket in buckets:
            fill = bucket.fill()
            bucket.seal(fill)
            self.reduce(SealedRound(bucket, fill, Ident(0, 0, 0), [False] * len(bucket.slices))).result()

    @property
    def must_match(self) -> bool:
        """Whether a reduction that one rank leaves out would be answered by another rank's next one."""
        return self.partition.world_size > 1 and not all(exchange.blocks for exchange in self.exchanges.values())

    def shards(self, used: int) -> list[GradShard]:
        """Return a GradShard per bucket, views of its shard; ``used`` has a bit per parameter with a gradient."""
        shards, indices = [], indices_of(used)
        for bucket in self.partition.buckets:
            grads: list[Tensor | None] = [None] * len(bucket.slices)
            used_here = bucket.layout.params_in(indices)
            if used_here:
                views = zip(bucket.slice_grads(), bucket.slices, strict=True)
                grads = [grad if piece.param in indices else None for grad, piece in views]
            shards.append(GradShard(bucket.layout.index, bucket.slices, grads, used_here))
        return shards


class GradReduction(ABC):
    """How gradients become shards.

    The engine calls :meth:`send_rest`, agrees with the other ranks, calls :meth:`watch` if the agreement plans
    parameters, then :meth:`collect`, on every rank and on the user's thread. The engine may do so several times (to
    clip, to unscale) before :meth:`end_step`. :meth:`reset` may come at any time between. What is not abstract is what
    a reduction needs that does nothing before :meth:`collect`.

    Attributes:
        step_factor: factor by which the step multiplies the reduced gradients.
        grads_are_local: whether ``p.grad`` has this rank's own gradients until the engine collects them.
    """

    step_factor = 1.0
    grads_are_local = False

    def __init__(self, parts: ReductionParts) -> None:
        self._parts, self._partition = parts, parts.partition

    @abstractmethod
    def send_rest(self, error: ZeroOptError | None, *, absent: bool, steps: bool) -> OwnRounds:
        """Send what this rank has still to send of the current window. Waits for no other rank.

        Args:
            error: what went wrong on this rank so far.
            absent: this rank has run out of inputs (torch's ``Join``), and takes part with zeros.
            steps: the gradients are for a step, not to be clipped or unscaled first.
        """

    def disagreed(self) -> None:
        """Note that the ranks are at different points of training: the engine does not call :meth:`collect`."""

    @abstractmethod
    def collect(self, agreed: StepAgreement) -> Sequence[GradShard]:
        """Reduce what is left of the window; one shard per bucket, in bucket order. Collective."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Within the context, backward exchanges nothing."""
        return nullcontext()

    @abstractmethod
    def scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by a 0-dim tensor, in place."""

    def scale_in_step(self, factor: Tensor) -> None:
        """Multiply :attr:`step_factor` by a 0-dim tensor; where users read reduced gradients, scale these instead."""
        self.step_factor *= float(factor)

    def unscaling(self, factor: Tensor) -> AbstractContextManager[None]:  # noqa: ARG002  (of the protocol)
        """Return a context in which GradScaler multiplies every ``p.grad`` by ``factor``, a 0-dim tensor.

        On exit, gradients that were reduced from ``p.grad`` are multiplied too.
        """
        return nullcontext()

    def within_hook(self) -> bool:
        """Return whether the caller's thread is handing a gradient over: a signal handler, a finalizer, or a hook."""
        return False

    def reset(self) -> None:
        """Void the gradients of this epoch: ``zero_grad`` was called."""

    @abstractmethod
    def end_step(self) -> None:
        """Note that a step was taken with the shards of the last :meth:`collect`."""

    def watch(self, buckets: Sequence[GradBucket]) -> None:
        """Take in buckets that were added to the partition."""

    def hook_params(self) -> None:
        """Note the gradients of every parameter from now on, also of those that are frozen, and not planned."""

    @property
    def begun(self) -> bool:
        """Whether other ranks have gradients of this one in their sums for the next step, and those count."""
        return False

    @property
    def holds_gradients(self) -> bool:
        """Whether the shards hold gradients that a step may use. Else they are void, and may be still to be written."""
        return True

    def close(self) -> None:
        """Stop listening to gradients."""
