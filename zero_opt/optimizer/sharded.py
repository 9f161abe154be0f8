"""The engine over several ranks, or with an offload or masters: a step as the journey of a gradient.

[Note: what one step() does]
1. Every rank reports what it has: its gradients, hyperparameters and edits. One exchange of messages compares them.
2. Parameters that became trainable, or got a gradient, are planned into buckets.
3. Reduction: what backward has not exchanged yet is exchanged. Each rank has its shard of the mean gradients.
4. Norm and finiteness, if they are asked for: one more exchange of messages.
5. The placement steps this rank's shard, bucket by bucket, and each bucket that is done starts to be gathered.
6. The gather ends, or goes on in the background. If the step failed on a rank, every rank hears of it.
Each of these is collective, in this order, on the user's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as DDPBucket
from torch._compile import _disable_dynamo

from ..comm.agreement import StepAgreement, StepReport, edits_digest
from ..errors import ConfigConflict, ConfigTypeError, StepDesync, StepFailed, UnsupportedParam, ZeroOptError
from ..layout import mask_of
from ..reduction import DDPHookReduction, GradShard, ReductionReport
from ..reduction.grad_norm import Measured, all_finite, check_max_norm, clip_factor, measure
from ..reduction.nonfinite import build_nonfinite
from ..sharding.buckets import GradBucket
from ..state.visible_state import Owner
from ..system.log import log
from .between_steps import BetweenSteps, SteppedTogether
from .config import Config
from .contents import EditDigest, edit_contents
from .join import follow_hypers, join_notice
from .loss_scale import overflowed, unscaling
from .offload_state import Parked
from .process_groups import OwnGroups


class ShardedEngine(BetweenSteps):
    """See the module, and :class:`Engine`.

    Attributes:
        begun: whether ``Join`` knows that this rank is about to take the next step.
    """

    def __init__(
        self,
        config: Config,
        groups: OwnGroups,
        describe: Callable[[int], str],
        user: SteppedTogether,
        parked: Parked,
        owner: Owner | None = None,
    ) -> None:
        """See :class:`BetweenSteps`. Collective."""
        super().__init__(config, groups, describe, user, parked, owner or user, self.unscale)
        self._notify_join, self.begun = join_notice(user), False
        self._digest = EditDigest()
        self._nonfinite = build_nonfinite(config.checks, describe)

    # -- the step -----------------------------------------------------------------------------------------------------

    @_disable_dynamo  # what torch.compile cannot trace, it calls
    def step(self, closure: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
        if options:
            raise ConfigTypeError(f"step() over several ranks takes a closure alone, got {sorted(options)}")
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        if not overflowed(self._user):
            with torch.inference_mode(False), torch.no_grad():
                agreed, shards = self.reduce()
                self._update(agreed, shards, unscaling(self._user))
        return loss

    def reduce(
        self, clip_to: float | None = None, *, absent: bool = False, error: ZeroOptError | None = None
    ) -> tuple[StepAgreement, Sequence[GradShard]]:
        """This rank's shards of the mean gradients, and what the ranks have agreed on. Collective.

        Args:
            clip_to: the norm that gradients will be clipped to, if this is not for a step.
            absent: this rank has run out of inputs (torch's ``Join``).
            error: what is wrong on this rank.

        Raises:
            UnsupportedParam: on every rank, if a parameter does not fit any more on one.
            StepFailed: on every rank, if an earlier step failed on one.
            StepPending: on every rank, if a parameter was changed on one that a pending step updates.
            ZeroOptError: on every rank, the ``error`` that one has.
        """
        self.placement.require_own()
        self.gather.flush()
        report = self.reduction.report(error or self._wrong_here(), absent=absent)
        agreed = self.agree(report, clip_to, absent=absent)
        self._planner.plan(agreed.used | agreed.trainable)
        shards = self.reduction.collect(agreed)
        if agreed.absent:
            follow_hypers(self.agreement.group, self.parts.param_groups, agreed.absent)
        if not agreed.same_hypers:
            dropped = map(self._describe, self.parts.shown.dropped)
            self.agreement.on_contents(edit_contents(self.parts.param_groups, dropped))
        return agreed, shards

    def _wrong_here(self) -> ZeroOptError | None:
        """Take over what the user has done since the last step; what is wrong with this rank, for all to hear."""
        error = self._parked.error() or self._guard.untold() or self._adopt_edits()
        try:
            self._follow_moved()
        except UnsupportedParam as found:
            error = error or found
        return error or self.placement.conflict()

    def agree(self, report: ReductionReport, clip_to: float | None, *, absent: bool) -> StepAgreement:
        """Compare with the other ranks what this one brings to the step. Collective."""
        count, edits = self.count, self.partition.edits()
        mine = self.step_report(report, clip_to, edits, absent=absent)
        if not self.begun and not absent:
            self._notify_join()
        self.begun = True
        try:
            agreed = self.agreement.on_step(mine, len(self.parts.params), report.error)
        except StepDesync as desync:
            self.reduction.disagreed()
            count.epoch = count.epoch if desync.epoch is None else desync.epoch
            raise
        except StepFailed:
            self._behind = True
            raise
        if absent:
            count.epoch = agreed.epoch
        self._accept_edits(edits, agreed)
        return agreed

    def step_report(
        self, report: ReductionReport, clip_to: float | None, edits: Mapping[int, int], *, absent: bool
    ) -> StepReport:
        """What this rank brings to the step."""
        params = self.parts.params
        return StepReport(
            self.count.step,
            self.count.epoch,
            report.rounds,
            used=mask_of(i for i, param in enumerate(params) if param.grad is not None),
            trainable=mask_of(i for i, param in enumerate(params) if param.requires_grad),
            restarted=mask_of(report.restarted),
            absent=absent,
            clip_to=clip_to,
            hypers=self._digest.of(self.parts.param_groups, self.parts.shown.dropped),
            abandoned=report.abandoned,
            edits=edits_digest(edits),
        )

    def _accept_edits(self, edits: Mapping[int, int], agreed: StepAgreement) -> None:
        """Accept the user's writes to parameters if values are equal on all ranks; see :meth:`Agreement.on_edits`."""
        if not agreed.same_edits:
            unseen = self.agreement.on_edits(edits, self.parts.params) - edits.keys()
            # Parameters that were written to on other ranks have the same values here: let masters take those over.
            params = [self.partition.flats[index].param for index in unseen]
            torch.autograd.graph.increment_version([param for param in params if not param.is_inference()])
        if edits or not agreed.same_edits:
            self.partition.settle()

    def _update(self, agreed: StepAgreement, shards: Sequence[GradShard], grad_scale: float) -> None:
        """Step this rank's shards, and gather the updated parameters. Collective.

        Args:
            grad_scale: what gradients are multiplied by first.

        Raises:
            NonFiniteGradient: on every rank, before anything is changed. StepFailed: see :meth:`_end_step`.
        """
        limit, look = self._config.max_grad_norm, cache(partial(self.measure, shards))
        grad_scale *= self.reduction.grad_scale
        if self._nonfinite.skips(look):
            self.skips, self.begun = self.skips + 1, False
            return
        if limit is not None:
            grad_scale *= float(clip_factor(look().norm * grad_scale, limit))
        with self._guard.whole():
            self.gather.begin(self.count.step)
            for bucket in self._stepped(shards, grad_scale):
                self.gather.start(bucket, failed=self._guard.lacks())
            self._end_step(agreed, self.gather.end())

    def _stepped(self, shards: Sequence[GradShard], grad_scale: float) -> Iterator[GradBucket]:
        """Step this rank's shards; yields every bucket that some rank updates once it is up to date here.

        If the placement fails they come as they are, because the other ranks wait for them: :meth:`_end_step` raises.
        """
        buckets = self.partition.buckets
        left = list(self.placement.updated_buckets(shards))
        if self._behind:
            left += [index for index in range(len(buckets)) if index not in left]
        try:
            self._guard.begin(self.parts.patience_s)
            self._guard.failed(None)
            for index in self.placement.step(shards, self.parts.param_groups, grad_scale):
                left.remove(index)
                yield buckets[index]
        except Exception as error:  # whatever it is
            self._guard.failed(error)
        yield from (buckets[index] for index in left)
        self._behind = False

    def _end_step(self, agreed: StepAgreement, failed: Sequence[int]) -> None:
        """Count the step, and show what state has become. Collective where the step has failed on some ranks.

        Args:
            failed: those of the ranks that every rank knows of.

        Raises:
            Exception: the step failed on this rank. StepFailed: it failed on another. Ranks that do not know of the
                failure raise StepFailed later.
        """
        failure, count = self._guard.failure, self.count
        if count.step == 0 and not agreed.used:
            log.warning(
                "the first step() met no gradient on any rank, and changed nothing; if fully_shard() or another "
                "wrapper has replaced the model's parameters, construct the optimizer after it"
            )
        self.reduction.stepped()
        count.step, count.epoch, self.begun = count.step + 1, 0, False
        self._groups.control.in_step(count.step)
        self.partition.settle()
        with self.parts.shown.lock:
            self._guard.commit(count.step)
            if failure is None:
                self.parts.shown.stepped(agreed.used)
                self._show_state()
        if failed:
            self._behind = True
            self.agreement.raise_first_error(self._guard.lacking(), "step()", own=failure)
        if failure is not None:
            raise failure

    def clip(self, max_norm: object) -> Tensor:
        limit, error = 0.0, None
        try:  # what one rank alone gets wrong, the others must hear of
            limit = check_max_norm(max_norm, "max_norm")
        except ZeroOptError as found:
            error = found
        _, shards = self.reduce(limit, error=error)
        return self._clip(shards, limit)

    def _clip(self, shards: Sequence[GradShard], max_norm: float) -> Tensor:
        """Scale reduced gradients that a step is to be taken with; the norm before. Collective."""
        measured = self.measure(shards)
        norm = measured.norm * self.reduction.grad_scale
        if not self._nonfinite.skips(lambda: measured):
            widened = any(map(self._config.widens, self.partition.buckets))
            (self.reduction.scale_in_step if widened else self.reduction.scale)(clip_factor(norm, max_norm))
        return norm

    def unscale(self, inv_scale: Tensor) -> bool:
        """Multiply the reduced gradients for GradScaler; whether any rank found a non-finite one. Collective."""
        agreed, shards = self.reduce()
        if agreed.absent:
            raise ConfigConflict(
                "GradScaler cannot unscale while ranks have run out of inputs (Join): they do not know its scale"
            )
        found = not all_finite([grad for shard in shards for grad in shard.grads if grad is not None])
        self.reduction.scale(inv_scale)
        return self.agreement.any(found)

    def measure(self, shards: Sequence[GradShard]) -> Measured:
        """Global L2 norm of the reduced gradients, and whether they are finite. Collective."""
        params = [piece.param for shard in shards for piece in shard.slices]
        known = [sums for shard in shards for sums in self.partition.buckets[shard.bucket].squares()]
        return measure([grad for shard in shards for grad in shard.grads], params, self._groups.control, known)

    @property
    def unscales(self) -> bool:
        return any(param.dtype is torch.float16 for param in self.parts.params)

    def zero_grad(self) -> None:
        self.reduction.reset()
        self.count.epoch += 1

    def no_sync(self) -> AbstractContextManager[None]:
        return self.reduction.no_sync()

    def take_bucket(self, bucket: DDPBucket) -> None:
        if not isinstance(self.reduction, DDPHookReduction):
            raise ConfigConflict("zero_opt.ddp_hook needs a ShardedOptimizer made with reduction=zero_opt.DDPHook()")
        first, last = bucket.index() == 0, bucket.is_last()
        self.reduction.take_bucket(bucket.parameters(), bucket.buffer(), first=first, last=last)

    def shadow_step(self) -> None:
        for param in self.parts.params:
            param.grad = None
        self.zero_grad()
        agreed, shards = self.reduce(absent=True)
        while agreed.clip_to is not None:
            self._clip(shards, agreed.clip_to)
            agreed, shards = self.reduce(absent=True)
        self._update(agreed, shards, 1.0)

    def forget_epoch(self) -> None:
        self.count.epoch = 0
