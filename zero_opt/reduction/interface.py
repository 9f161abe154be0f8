"""The seam between gradients and the step: what every reduction hands on, and what it is built from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm.agreement import Agreement, StepAgreement, StepReport, edits_digest
from ..comm.exchange import Exchange, Ident, StagingPool
from ..errors import StepDesync, ZeroOptError
from ..layout import ParamSlice
from ..sharding.buckets import Fill, GradBucket
from ..sharding.partition import Partition
from ..system.background_thread import SerialThread

_log = logging.getLogger("zero_opt")


class GradShard(NamedTuple):
    """This rank's part of one bucket's reduced gradient.

    Attributes:
        bucket: index of the bucket. slices: this rank's parameter slices in it.
        grads: one per slice of this rank, in slice order: in the parameter's shape where the slice is whole, else 1-D;
            ``None`` where no rank used the parameter.
        used: whether any parameter of the bucket, on any rank, has a gradient.
    """

    bucket: int
    slices: Sequence[ParamSlice]
    grads: Sequence[Tensor | None]
    used: bool


@dataclass
class Progress:
    """Where training is; shared by the parts of one optimizer.

    Attributes:
        step: optimizer steps done. epoch: ``zero_grad`` calls since the last step.
        absent: this rank has run out of inputs (torch's ``Join``), and takes part with zeros.
        absentees: ranks of which that is so, as far as agreed. clip_to: the norm to clip to, while clipping.
        begins: called before this rank first hears of the others in a step.
        used: bit per parameter, whether any rank brought a gradient when ranks last agreed on a step.
        skips: steps that were not taken because of non-finite gradients.
        hypers: a digest of the hyperparameters. same_hypers: whether the others had the same, when last agreed.
    """

    step: int = 0
    epoch: int = 0
    absent: bool = False
    absentees: Sequence[int] = ()
    clip_to: float | None = None
    begins: Callable[[], object] | None = None
    begun: bool = False
    used: int = 0
    hypers: int = 0
    same_hypers: bool = True
    skips: int = 0

    def begin(self) -> None:
        """Ranks are about to hear of each other."""
        if not self.begun and not self.absent and self.begins is not None:
            self.begins()
        self.begun = True

    def stepped(self) -> None:
        """A step has been taken."""
        if self.step == 0 and not self.used:
            _log.warning(
                "the first step() met no gradient on any rank, and changed nothing; if fully_shard() or another "
                "wrapper has replaced the model's parameters, construct the optimizer after it"
            )
        self.step, self.epoch, self.begun = self.step + 1, 0, False

    def skipped(self) -> None:
        """A step has not been taken, on any rank; it is still to come."""
        self.skips, self.begun = self.skips + 1, False

    def forget_epoch(self) -> None:
        """Ranks without inputs have not called ``zero_grad`` after the last step."""
        self.epoch = 0


@dataclass
class Parts:
    """What a reduction works with.

    Attributes:
        exchanges: by device type.
        thread: runs everything that exchanges with other ranks off the main thread, in one order.
        all_params: every parameter of the optimizer by global index, planned or not.
        admit: plans those of the masked parameters that are not planned yet; called once all ranks agree on the mask.
    """

    partition: Partition
    agreement: Agreement
    exchanges: Mapping[str, Exchange]
    thread: SerialThread
    all_params: Callable[[], Sequence[Tensor]]
    admit: Callable[[int], None]
    progress: Progress = field(default_factory=Progress)
    pool: StagingPool = field(default_factory=StagingPool)

    def exchange_of(self, bucket: GradBucket) -> Exchange:
        """The exchange that carries a bucket."""
        return self.exchanges[bucket.device.type]

    def reduce(self, bucket: GradBucket, fill: Fill, ident: Ident, accumulate: Sequence[bool]) -> Future[bool]:
        """Reduce a launched round of a bucket: on the background thread if the exchange blocks, else here and now.

        What fails here fails in the backward: a collective that was not enqueued must not count as one.
        """
        exchange = self.exchange_of(bucket)
        if exchange.blocks:
            return self.thread.submit(bucket.reduce, fill, ident, accumulate, exchange, self.pool)
        done: Future[bool] = Future()
        done.set_result(bucket.reduce(fill, ident, accumulate, exchange, self.pool))
        return done

    @property
    def must_match(self) -> bool:
        """Whether a reduction that one rank leaves out would be answered by another rank's next one."""
        return self.partition.world_size > 1 and not all(exchange.blocks for exchange in self.exchanges.values())

    def trainable_mask(self) -> int:
        """Bit per parameter: requires_grad."""
        return sum(1 << index for index, param in enumerate(self.all_params()) if param.requires_grad)

    def used_mask(self) -> int:
        """Bit per parameter: it has a gradient here."""
        return sum(1 << index for index, param in enumerate(self.all_params()) if param.grad is not None)

    def agree(
        self, rounds: int, error: ZeroOptError | None, restarted: Iterable[int] = (), abandoned: int = 0
    ) -> StepAgreement:
        """Agree with the other ranks on this step, and plan parameters that became trainable."""
        progress = self.progress
        edits = self.partition.edits()
        report = StepReport(
            progress.step,
            progress.epoch,
            rounds,
            used=self.used_mask(),
            trainable=self.trainable_mask(),
            restarted=sum(1 << index for index in restarted),
            absent=progress.absent,
            clip_to=progress.clip_to,
            hypers=progress.hypers,
            abandoned=abandoned,
            edits=edits_digest(edits),
        )
        progress.begin()
        try:
            agreed = self.agreement.on_step(report, len(self.all_params()), error)
        except StepDesync as desync:
            progress.epoch = progress.epoch if desync.epoch is None else desync.epoch
            raise
        if progress.absent:
            progress.epoch, progress.clip_to = agreed.epoch, agreed.clip_to
        progress.absentees, progress.same_hypers = agreed.absent, agreed.same_hypers
        progress.used = agreed.used
        self._follow_edits(edits, agreed)
        self.admit(agreed.used | agreed.trainable)
        return agreed

    def _follow_edits(self, edits: Mapping[int, int], agreed: StepAgreement) -> None:
        """Accept the user's writes to parameters if values are equal on all ranks; see :meth:`Agreement.on_edits`."""
        if not agreed.same_edits:
            unseen = self.agreement.on_edits(edits, self.all_params()) - edits.keys()
            # Parameters that were written to on other ranks have the same values here: let masters take those over.
            params = [self.partition.flats[index].param for index in unseen]
            torch.autograd.graph.increment_version([param for param in params if not param.is_inference()])
        if edits or not agreed.same_edits:
            self.partition.settle()


class GradReduction(Protocol):
    """How gradients become shards. Methods are called on every rank in the same order, ``reset`` excepted.

    Attributes:
        grad_scale: factor by which the step multiplies the reduced gradients.
    """

    grad_scale: float

    def finish(self, error: ZeroOptError | None = None) -> Sequence[GradShard]:
        """Reduce what is left of this window; one shard per bucket, in bucket order.

        Args:
            error: what went wrong on this rank before the ranks could agree; raised on all of them.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward exchanges nothing."""

    def scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by a 0-dim tensor, in place."""

    def scale_in_step(self, factor: Tensor) -> None:
        """Multiply :attr:`grad_scale` by a 0-dim tensor; where users read reduced gradients, scale these instead."""

    def reset(self) -> None:
        """``zero_grad`` was called: what has been gathered so far is void."""

    def stepped(self) -> None:
        """The step that used the last :meth:`finish` is done."""

    def watch(self, buckets: Sequence[GradBucket]) -> None:
        """Parameters were added to the partition."""

    @property
    def shards_count(self) -> bool:
        """Whether the shards hold gradients that a step may use. Else they are void, and may be still to be written."""

    def close(self) -> None:
        """Stop listening to gradients."""


def shard_list(parts: Parts, used: int) -> list[GradShard]:
    """One GradShard per bucket over the buckets' own shard memory."""
    shards = []
    for bucket in parts.partition.buckets:
        any_used = any(used >> index & 1 for index in bucket.layout.params)
        if any_used:
            views = bucket.slice_grads()
            grads = [g if used >> piece.param & 1 else None for g, piece in zip(views, bucket.slices, strict=True)]
        else:
            grads = [None] * len(bucket.slices)
        shards.append(GradShard(bucket.layout.index, bucket.slices, grads, any_used))
    return shards
