"""The engine over several ranks, or with an offload or masters: a step as the journey of a gradient.

[Note: what one step() does]
1. Report: this rank takes over the user's edits, and sends gradients that backward has not. Every rank tells the others
   what it has, in one message; where edits of parameters differ, values are compared.
2. Plan: parameters that became trainable, or got a gradient, are planned into buckets.
3. Collect: what the ranks have not had equally often is exchanged. Each rank has its shards of the mean gradients.
   Where hyperparameters differ, every rank raises the error now.
4. Norm: its value, and whether gradients are finite, take one more exchange of messages, if they are asked for.
5. Step and gather: the placement steps this rank's shards bucket by bucket. Each stepped bucket starts to be gathered.
6. End: the gather ends, or goes on in the background. If the step failed on a rank, every rank hears of it.
:meth:`ShardedEngine.reduce` does 1 to 3, the rest is in :meth:`ShardedEngine._update`. Each phase is collective, in
this order, on the user's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as DDPBucket
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join

from ..comm.agreement import StepAgreement, StepReport, edits_digest
from ..comm.backend_errors import first_line, is_loss
from ..comm.transfers import peer_lost
from ..errors import (
    ConfigConflict,
    PeerLost,
    StateDictError,
    StepDesync,
    StepFailed,
    ZeroOptError,
)
from ..layout import mask_of, mask_of_flags
from ..policies import AlreadyReduced, DDPHook
from ..reduction import DDPHookReduction, GradShard, OwnRounds
from ..reduction.grad_norm import (
    Joint,
    Measured,
    Share,
    all_finite,
    alone,
    check_max_norm,
    clip_factor,
    norm_dtype,
    share_of,
)
from ..reduction.nonfinite import skips_step
from ..sharding.buckets import GradBucket
from ..sharding.late_params import await_others
from ..system.log import log
from ..system.phases import Phase
from ..system.saved_tensors import keep_saved
from .arguments import check_options, refusal_of_step
from .between_steps import BetweenSteps
from .contents import hyper_contents
from .hyperparameters import moves_nothing
from .interface import MET_NONE
from .join import ends_join, follow_hypers
from .loss_scale import forgets_scaler, inverse_scale, leaves_scaled, overflowed, tell_scaler
from .one_call import one_call

_grad_of, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")


class ShardedEngine(BetweenSteps):
    """The engine that reduces gradients, steps this rank's shards, and gathers the parameters; see the module."""

    _met_none = False  # whether a step has met no gradient, which the log says once

    # -- the step -----------------------------------------------------------------------------------------------------

    @_disable_dynamo  # what torch.compile cannot trace, it calls
    def step(
        self, closure: Callable[[], Any] | None, options: Mapping[str, Any], error: ZeroOptError | None = None
    ) -> Any:
        error = error or refusal_of_step(closure, options)
        with torch.enable_grad():
            loss = closure() if closure is not None and error is None else None
        self.placement.loss = () if closure is None else (loss,)
        try:
            with torch.no_grad(), self.of_all_ranks(), self.parts.figures.call():
                keep_saved(self.parts.params)
                self._update(*self.reduce(error=error))
                self._end_figures()
        finally:
            self.placement.loss = ()  # which holds its graph
        return loss

    def _end_figures(self) -> None:
        sent = sum(exchange.sent_nbytes for exchange in self.parts.exchanges.values())
        self.parts.figures.end_step(self.parts.thread.busy.seconds, sent, self.placement.figures())

    def summary(self) -> str:
        config, group, threads = self._config, self.group, self.placement.threads
        ways = " and ".join({exchange.way for exchange in self.parts.exchanges.values() if exchange.way})
        return "; ".join(
            (
                f"{config.optimizer_class.__name__} on rank {group.rank} of {group.world_size}",
                f"{config.reduction}" + (f" through {ways}" if ways else ""),
                "no offload" if config.offload is None else f"{config.offload}",
                *([] if threads is None else [f"{threads} thread{'s' if threads > 1 else ''}"]),
            )
        )

    def stats(self) -> dict[str, float]:
        return {"steps": float(self.count.step), "skipped_steps": float(self.skips), **self.parts.figures.last()}

    def reduce(
        self,
        clip_to: float | None = None,
        *,
        unscale_by: float | None = None,
        absent: bool = False,
        error: ZeroOptError | None = None,
    ) -> tuple[StepAgreement, Sequence[GradShard]]:
        """Return this rank's shards of the mean gradients, and what the ranks have agreed on. Collective.

        Args:
            clip_to: the norm that gradients will be clipped to, if the call is for clipping, not for a step.
            unscale_by: what GradScaler will multiply them by, if the call is for that.
            absent: this rank has run out of inputs (torch's ``Join``).
            error: an error on this rank, which all ranks are to raise.

        Raises:
            UnsupportedParam: on every rank, if a parameter does not fit any more on one.
            StepFailed: on every rank, if an earlier step failed on one.
            StepPending: on every rank, if a parameter was changed on one that a pending step updates.
            ZeroOptError: on every rank, the ``error`` that one has.
        """
        self.placement.require_not_forked()
        with Phase("gather"):
            self.gather.flush()
        if self._params_may_differ and self._config.offload is not None:  # no rank steps where one lacks a step before
            self._notify_join(absent=absent)
            self._bring_in("")
        steps = clip_to is None and unscale_by is None
        error = error or self._take_over_edits() or self.gather.refusal()
        error = error or (self._end_pending_step() if steps else None)
        self._notify_join(absent=absent)
        own = self.reduction.send_rest(error, absent=absent, steps=steps)
        with Phase("agreement"):
            agreed = self.agree(own, clip_to, unscale_by, absent=absent)
        self._planner.plan(agreed.used | agreed.trainable)
        with Phase("reduction"):
            shards = self.reduction.collect(agreed)
        if agreed.absent:
            follow_hypers(self.agreement.group, self.parts.param_groups, agreed.absent)
            with self.agreement.together():
                self._planner.make_room()
        if not agreed.same_hypers:
            self.agreement.require_same_contents(hyper_contents(self.parts.param_groups))
            self.agreement.require_dropped_alike(self.parts.visible.dropped, self.parts.visible.kept())
        return agreed, shards

    def _notify_join(self, *, absent: bool) -> None:
        """Tell ``Join`` that this rank is about to take a step, once per step. Collective of ranks that have inputs."""
        self._sends = True
        if not (absent or self.join_notified):
            try:
                Join.notify_join_context(self._user)
            except RuntimeError as error:
                if ends_join(error):
                    self.group.told = id(error)
                if not is_loss(error):
                    raise
                lost = self.group.explain(first_line(error))
                with peer_lost("another rank, which Join waits for,"):
                    raise lost or error from error
        self.join_notified |= not absent

    def _take_over_edits(self) -> ZeroOptError | None:
        """Take over the user's edits since the last step. Return an error of this rank that all ranks are to raise."""
        error: ZeroOptError | None = self._parked.error() or self._guard.untold_failure()
        if self._half_loaded:
            error = StateDictError(
                "load_state_dict() has ended with an error after it had begun to write, so the state is that of no "
                "step; load a checkpoint on all ranks"
            )
        error = error or self._adopt_edits()
        try:
            await_others(self._lagging, self.parts.params)
            self._follow_moved()
            if error is None:
                check_options(self._user.param_groups)
                self._forms.check(self._user.param_groups, self._user.state)
                self.placement.require_counts()
            error = error or self.placement.conflict()
            if error is None:
                self._planner.make_room()
        except ZeroOptError as refused:
            error = error or refused
        return error

    def _end_pending_step(self) -> ZeroOptError | None:
        """Let a pending step end. Return why it cannot: once the ranks have agreed on the next one it is too late."""
        try:
            self.placement.wait()
        except ZeroOptError as error:
            return error
        return None

    def agree(self, own: OwnRounds, clip_to: float | None, unscale_by: float | None, *, absent: bool) -> StepAgreement:
        """Compare this rank's report of the step with the other ranks'. Collective."""
        count, edits = self.count, self.partition.edits()
        mine = replace(self.step_report(own, edits), clip_to=clip_to, absent=absent)
        if unscale_by is not None:
            mine = replace(mine, unscales=True, inv_scale=unscale_by)
        try:
            agreed = self.agreement.agree_on_step(mine, len(self.parts.params), own.error)
        except StepDesync as desync:
            self.reduction.disagreed()
            count.epoch = count.epoch if desync.epoch is None else desync.epoch
            raise
        except StepFailed:
            self._told_failure()
            raise
        if absent:
            count.epoch = agreed.epoch
        self._accept_edits(edits, agreed)
        return agreed

    def step_report(self, own: OwnRounds, edits: Mapping[int, int]) -> StepReport:
        """Return this rank's report of the step."""
        params = self.parts.params
        return StepReport(
            self.count.step,
            self.count.epoch,
            own.rounds,
            used=mask_of_flags(map(is_not, map(_grad_of, params), repeat(None))),
            trainable=mask_of_flags(map(_requires_grad, params)),
            restarted=mask_of(own.restarted),
            inv_scale=inverse_scale(self._user),
            scaled=leaves_scaled(self._user),
            overflows=overflowed(self._user),
            hypers=0 if own.error else self._digest.of(self.parts.param_groups, self.parts.visible.dropped),
            abandoned=own.abandoned,
            edits=edits_digest(edits),
            sample=own.sample,
        )

    def _accept_edits(self, edits: Mapping[int, int], agreed: StepAgreement) -> None:
        """Accept the user's writes to parameters if the values are equal on all ranks, as far as they are compared."""
        written = edits.keys()
        if not agreed.same_edits or self._user_edits.due(edits):
            if self._config.offload is not None:  # what differs is compared, and named, with no step pending
                self._bring_in("")
                edits = self.partition.edits()
            counts = self.agreement.edit_counts(edits)
            self.agreement.require_same_values(self._user_edits.to_compare(counts), self.parts.params)
            # Parameters that were written to on other ranks have the same values here. Masters take those over too.
            self.partition.count_edit(counts.keys() - edits.keys())
            written = counts.keys()
        if written:
            self._user_edits.accept(written)
            self.partition.accept_edits()

    def _update(self, agreed: StepAgreement, shards: Sequence[GradShard]) -> None:
        """Step this rank's shards, and gather the updated parameters. Collective.

        Raises:
            NonFiniteGradient: on every rank, before anything is changed. StepFailed: see :meth:`_end_step`.
        """
        limit = self._config.max_grad_norm
        measured = cache(partial(self._measured, shards, limit or 0.0))  # collective, once, and only if asked for
        grad_scale = agreed.grad_scale * self.reduction.step_factor
        tell_scaler(self._user, overflows=agreed.overflows)
        skips = not agreed.overflows and skips_step(self._config.checks, lambda: measured().nonfinite, self._describe)
        if agreed.overflows or skips:  # the window goes on; zero_grad() voids its gradients
            self.skips, self.join_notified = self.skips + skips, False
            return
        if limit is not None:
            norm = measured().norm * grad_scale
            factor = float(clip_factor(norm, limit))
            grad_scale *= factor
            self.parts.figures.note_clip(norm, factor)
        with self._guard.telling_why():
            self.gather.begin(self.count.step)
            in_order = [shards[bucket] for bucket in self.gather.order()]
            with Phase("update"):
                for bucket, updated, failed in self._step_buckets(in_order, grad_scale):
                    with Phase("gather"):
                        self.gather.start(bucket, updated, failed=failed)
            with Phase("gather"):
                failures = self.gather.end()
            self._end_step(agreed, failures)
            if self._user._join_config.enable:  # this may be the last step, after which DDP sends parameters to all
                self.gather.flush()
        if self.placement.pending and moves_nothing(self.parts.param_groups):
            # Torch takes such a step to make places for state that it loads, which must not be pending.
            self._bring_in("flush()")

    def _step_buckets(
        self, shards: Sequence[GradShard], grad_scale: float
    ) -> Iterator[tuple[GradBucket, Collection[int], bool]]:
        """Step this rank's shards. Yield every bucket that some rank updates, once it is up to date here.

        With it come the parameters that are updated, by global index, and False.

        From here on, until :meth:`_end_step`, no other rank reads the state. If the placement fails, the rest of the
        buckets come as they are, with True, because the other ranks wait for them; :meth:`_end_step` raises the error.
        """
        buckets = self.partition.buckets
        left = dict(self.placement.updated_params(shards))
        if self._params_may_differ:  # gather again what an earlier step has left apart
            left |= {bucket.layout.index: bucket.layout.params for bucket in buckets}
        stepped = self._step_placement(shards, grad_scale)
        try:
            while (index := self._next_stepped(stepped)) is not None:
                yield buckets[index], left.pop(index), False
        except BaseException:  # whatever it is
            self._note_entries()
            raise
        failed = self._guard.failure is not None
        yield from ((buckets[index], updated, failed) for index, updated in left.items())
        self._params_may_differ = False

    def _step_placement(self, shards: Sequence[GradShard], grad_scale: float) -> Iterator[int]:
        """Step this rank's shards. Yield the buckets that are up to date here."""
        self._guard.begin(self.parts.patience_s)
        self._guard.note_failure(None)
        yield from self.placement.step(shards, self.parts.param_groups, grad_scale)

    def _next_stepped(self, stepped: Iterator[int]) -> int | None:
        """Return the next bucket; ``None`` after the last, or if the step fails, which is noted."""
        try:
            return next(stepped, None)
        except Exception as error:
            self._note_entries()
            # Python turns a StopIteration that leaves a generator into a RuntimeError (PEP 479).
            by_generator = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
            own = error.__cause__ if by_generator and isinstance(error.__cause__, Exception) else error
            self._guard.note_failure(own)
            return None

    def _note_entries(self) -> None:
        """Remember the user's entries: the step may be pending, and what users make of them from here on is undone."""
        with self.parts.visible.lock:
            self.parts.visible.note_entries()

    def _end_step(self, agreed: StepAgreement, failed: Sequence[int]) -> None:
        """Count the step, and let users see the new state. Collective if the step has failed on a rank in ``failed``.

        Args:
            failed: the ranks of which every rank knows that the step has failed there.

        Raises:
            Exception: the step failed on this rank. StepFailed: it failed on another. Ranks that do not know of the
                failure raise StepFailed later.
        """
        failure, count = self._guard.failure, self.count
        if not (agreed.used or self._met_none):
            self._met_none = True
            log.warning(MET_NONE)
        self.reduction.end_step()
        count.step, count.epoch, self.join_notified = count.step + 1, 0, False
        self._groups.control.in_step(count.step)
        self.partition.accept_edits()
        with self.parts.visible.lock:
            self.parts.visible.count_step(agreed.used)  # also where it failed: other ranks have stepped their parts
            if failure is None:
                self._show_state()
            self._guard.commit(count.step)
        if failed:
            self._told_failure()
            self.agreement.raise_first_error(self._guard.missing_part(), "step()", own=failure)
        if failure is not None:
            raise failure

    def clip(self, max_norm: object, joint: Joint = alone, error: ZeroOptError | None = None) -> Tensor:
        limit = 0.0  # the ranks are told that this call clips, also where what was given is no norm
        try:  # all ranks raise the error of one
            limit = check_max_norm(max_norm, "max_norm")
        except ZeroOptError as refused:
            error = error or refused
        with self.of_all_ranks(), self.parts.figures.call():
            _, shards = self.reduce(limit, error=error)
            return self._clip(shards, limit, joint)

    def _clip(self, shards: Sequence[GradShard], max_norm: float, joint: Joint = alone) -> Tensor:
        """Clip reduced gradients, unless they will be skipped; return the norm before. Collective."""
        measured = self._measured(shards, max_norm, self.reduction.step_factor, joint)
        norm = measured.norm
        if not self.will_skip(measured.nonfinite):
            widened = any(map(self._config.widens, self.partition.buckets))
            # Gradients that the step widens are scaled after that, so that they are not rounded twice.
            factor = clip_factor(norm, max_norm)
            scale = self.reduction.scale_in_step if widened and factor.isfinite() else self.reduction.scale
            scale(factor)
            self.parts.figures.note_clip(norm, float(factor))
        return norm

    def will_skip(self, nonfinite: tuple[int, int] | None) -> bool:
        return skips_step(self._config.checks, lambda: nonfinite, self._describe)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.group.ranks)

    @one_call("scaler.unscale_(opt)")
    def unscale(self, inv_scale: Tensor) -> bool:
        with forgets_scaler(self._user), self.of_all_ranks(), self.parts.figures.call():
            _, shards = self.reduce(unscale_by=float(inv_scale))
            finite = all_finite([grad for shard in shards for grad in shard.grads if grad is not None])
            self.reduction.scale(inv_scale)
            return self.agreement.any(not finite)

    def _measured(
        self, shards: Sequence[GradShard], limit: float, factor: float = 1.0, joint: Joint = alone
    ) -> Measured:
        """Return what the reduced gradients, multiplied by ``factor``, and those that join them are. Collective."""
        with Phase("norm"):
            share = self.share(shards, limit)
            return joint(share._replace(square=share.square * factor * factor))

    def share(self, shards: Sequence[GradShard], limit: float) -> Share:  # noqa: ARG002  (ranks have compared it)
        """Return what the reduced gradients add to a norm.

        Args:
            limit: what the norm will be clipped to; 0 if it will not.
        """
        params = [piece.param for shard in shards for piece in shard.slices]
        known = [sums for shard in shards for sums in self.partition.buckets[shard.bucket].squares()]
        dtype = norm_dtype(bucket.params[0].param for bucket in self.partition.buckets)
        return share_of([grad for shard in shards for grad in shard.grads], params, self._groups.control, known, dtype)

    @property
    def unscales(self) -> bool:
        return any(param.dtype is torch.float16 for param in self.parts.params)

    @property
    def grads_are_local(self) -> bool:
        return self.reduction.grads_are_local

    def unscaling(self, factor: Tensor) -> AbstractContextManager[None]:
        return self.reduction.unscaling(factor)

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
        if not self.reduction.begun:  # what other ranks have in their sums is in those of this one, too
            self._drop_grads()
        try:
            with self.of_all_ranks():
                agreed, shards = self.reduce(absent=True)
                while agreed.clip_to is not None:
                    self._clip(shards, agreed.clip_to)
                    agreed, shards = self.reduce(absent=True)
                self._update(agreed, shards)
        except ZeroOptError as error:
            if not isinstance(error, PeerLost):
                self._drop_grads()
            raise
        self._drop_grads()

    def _drop_grads(self) -> None:
        """Drop what other ranks have reduced to this one, for which no call of the user's does."""
        for param in self.parts.params:
            param.grad = None
        self.reduction.reset()

    def forget_epoch(self) -> None:
        self.count.epoch = 0
        if self._config.offload is not None and isinstance(self._config.reduction, (AlreadyReduced, DDPHook)):
            # DDP, which ends first, has sent the last rank's parameters to all ranks. Where no rank has been written to
            # otherwise, they have the values that they had.
            writes = self.partition.edits()
            by_ddp = len(writes) == len(self.partition.flats) and len(set(writes.values())) == 1
            if not self.agreement.any(not by_ddp):
                self.placement.ignore_writes()
