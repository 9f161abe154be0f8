"""The parts of a sharded optimizer, connected: groups, partition, reduction, placement, gather, consolidation."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.backend_exchanges import build_exchange
from ..comm.exchange import Exchange, close_all
from ..errors import ParamsReplaced, PeerLost, StepFailed, UnsupportedParam, ZeroOptError
from ..placement import Placement, Results, build_placement, build_results
from ..policies import AlreadyReduced
from ..reduction import GradShard, Parts, build_reduction
from ..reduction.consumed_grad import ConsumedGrad
from ..reduction.grad_norm import Measured, clip_factor, measure
from ..reduction.nonfinite import build_nonfinite
from ..sharding.background_gather import build_gather
from ..sharding.buckets import GradBucket
from ..sharding.gather import spread
from ..sharding.param_groups import PlannedGroups, hypers_of
from ..sharding.partition import Geometry, Partition
from ..sharding.wrapped_class import is_elementwise
from ..state.full_state import WholeState
from ..state.guard import StateGuard, marks
from ..state.stand_ins import StandIns, kinds_of
from ..state.visible_state import Owner, ShownState
from ..system.background_thread import SerialThread
from ..system.streams import wait_done
from .config import Recipe
from .contents import EditDigest, contents, edit_contents, loaded_contents, value_contents
from .join import follow_hypers
from .offload_state import Parked
from .process_groups import OwnGroups

_log = logging.getLogger("zero_opt")
# The background thread has so long to end what it has begun; else its memory stays where it is.
_IDLE_S = 1.0


class Wiring:
    """Everything that exists at world size > 1, or with an offload, only.

    Its users' groups and state are those of ``owner``.
    """

    def __init__(
        self,
        recipe: Recipe,
        groups: OwnGroups,
        describe: Callable[[int], str],
        owner: Owner,
        parked: Parked,
    ) -> None:
        self._recipe, self._groups, self._describe, self._owner = recipe, groups, describe, owner
        self._params: list[Tensor] = []
        self._group_of: list[int] = []
        self._known_groups = 0
        self.planned = PlannedGroups(owner)
        self._loaded = False
        self._digest = EditDigest()
        # Whether ranks must have equal values when they plan parameters. Under DDP they need not: it may come later.
        self._values_count = groups.control.world_size > 1 and not isinstance(recipe.reduction, AlreadyReduced)
        self._nonfinite = build_nonfinite(recipe.checks, describe)
        self._closed = False
        self._parked = parked
        self._owed = False  # ranks may not have all of each other's updates
        dtypes = (recipe.precision.reduce_dtype, recipe.precision.accumulate_dtype)
        geometry = Geometry(not is_elementwise(recipe.optimizer_class), recipe.reduction.bucket_mb, *dtypes)
        self.agreement = Agreement(groups.control, describe)
        self.agreement.on_contents(recipe.entries())  # what comes below is collective, and differs with it
        self.partition = Partition(groups.control, geometry, describe)
        self._guard = StateGuard(partial(marks, self.partition.streams), self.partition.edits)
        self._exchanges: dict[str, Exchange] = {}
        self._thread = SerialThread("zero_opt exchange", partial(close_all, self._exchanges))
        groups.leave_with(self._exchanges, self._thread)
        parts = Parts(self.partition, self.agreement, self._exchanges, self._thread, lambda: self._params, self._admit)
        self._pool, self.progress = parts.pool, parts.progress
        self.reduction = build_reduction(recipe.reduction, parts)
        model = recipe.reduction.overlap_param_gather
        results = build_results(model)
        self.placement = self._build_placement(results)
        self._whole = WholeState(self.agreement, self.partition, self.placement, self._guard)
        self._shown = ShownState(
            owner, StandIns(recipe.optimizer_class, recipe.defaults), self.partition, self.placement
        )
        self.gather = build_gather(self.partition, self._exchanges, self._thread, model, results)

    @property
    def _param_groups(self) -> Sequence[MutableMapping[str, Any]]:
        return self._owner.param_groups

    def require_replaceable(self) -> None:
        """Raise ParamsReplaced if the user has replaced parameters, and it is too late to plan the new ones."""
        reduced = any(isinstance(param.grad, ConsumedGrad) for param in self.planned)
        begun = reduced or self._loaded or self.progress.step + self.progress.skips > 0
        self.planned.require_replaceable(begun=begun)

    def _build_placement(self, results: Results) -> Placement:
        """The placement, or an error on all ranks if one has none. Collective."""
        recipe, placement = self._recipe, None
        try:
            with self.agreement.together("ShardedOptimizer()"):
                stepped = (recipe.offload, recipe.precision, recipe.optimizer_class, recipe.defaults)
                placement = build_placement(*stepped, self._groups.neighbors, recipe.reduction, results)
        except BaseException:
            if placement is not None:
                placement.close()
            raise
        assert placement is not None
        return placement

    def add_groups(self) -> None:
        """Take in the owner's param groups that are new, after comparing them with the other ranks'. Collective.

        Raises:
            RankMismatch: they differ. OutOfMemory, WorkerFailed, StorageFailed: no room. Nothing was taken in.
        """
        self.gather.flush()
        listed = contents(self._param_groups, self._known_groups, self._describe, values=self._values_count)
        self.agreement.on_contents(listed)
        self.agreement.reserve(sum(len(group["params"]) for group in self._param_groups))
        before = len(self._params)
        try:
            for number in range(self._known_groups, len(self._param_groups)):
                group = self._param_groups[number]
                self.placement.add_group(group)
                self._params.extend(group["params"])
                self._group_of.extend([number] * len(group["params"]))
            self._admit(sum(1 << i for i, param in enumerate(self._params) if param.requires_grad), compared=True)
        except BaseException:
            del self._params[before:], self._group_of[before:]
            self.placement.drop_groups(self._known_groups)
            raise
        self.planned.add()
        self._known_groups = len(self._param_groups)
        self._guard.commit(self.progress.step)
        self._groups.serve(self._guard, self.placement, self.partition)

    def _admit(self, mask: int, *, compared: bool = False) -> None:
        """Plan those of the masked parameters that are not planned yet; the mask is the same on every rank.

        Raises:
            RankMismatch: values differ between ranks, as those of frozen parameters may. Not checked if ``compared``.
        """
        missing = [i for i in range(len(self._params)) if mask >> i & 1 and i not in self.partition.flats]
        if missing and self._values_count and not compared:
            self.agreement.on_contents(value_contents([(self._describe(i), self._params[i]) for i in missing]))
        if missing:
            with self._guard.changing(self._patience_s, self.progress.step):
                self._plan(missing)

    def _plan(self, missing: Sequence[int]) -> None:
        added = self.partition.add((i, self._group_of[i], self._params[i]) for i in missing)
        try:
            self._connect()
            with self.agreement.together():
                self.placement.add(added)
        except BaseException:
            self.partition.drop(added)
            raise
        self._reserve_staging(added)
        self.reduction.watch(added)
        self.gather.watch()
        offload, precision = self._recipe.offload, self._recipe.precision
        self._shown.add(kinds_of(offload, precision, [(i, self._group_of[i], self._params[i]) for i in missing]))
        self._show_state()

    @property
    def _patience_s(self) -> float:
        """Seconds that this rank waits for another one that reads its state."""
        return self._groups.control.timeout_s

    def _reserve_staging(self, added: Sequence[GradBucket]) -> None:
        """Let staging buffers have room for new buckets, and nobody hold one that will be replaced for that."""
        for bucket in added:
            bucket.reserve_staging(self._pool)
        for bucket in self.partition.buckets:
            bucket.forget_staging()
        self.gather.forget()

    def _connect(self) -> None:
        """Make the exchanges for device types that have none yet. Collective."""
        groups = self._groups.control, self._groups.reduce, self._groups.gather
        by_type = {bucket.device.type: bucket.device for bucket in self.partition.buckets}
        for device_type in sorted(by_type):
            if device_type not in self._exchanges:
                sizes = (b.staging_nbytes for b in self.partition.buckets if b.device.type == device_type)
                host_bytes = max(sizes) if self._recipe.reduction.exchange == "auto" else 0
                made = build_exchange(by_type[device_type], groups, self._pool, host_bytes=host_bytes)
                self._exchanges[device_type] = made

    def finish(self, error: ZeroOptError | None = None, clip_to: float | None = None) -> Sequence[GradShard]:
        """Let parameters arrive, follow those whose data the user re-pointed, and reduce. Collective.

        Args:
            clip_to: the norm that gradients will be clipped to, if this is not for a step.

        Raises:
            UnsupportedParam: on every rank, if a parameter does not fit any more on one.
            StepFailed: on every rank, if an earlier step failed on one.
            StepPending: on every rank, if a parameter was changed on one that a pending step updates.
            ZeroOptError: on every rank, the ``error`` that one has.
        """
        self.placement.require_own()
        self.gather.flush()
        self.progress.clip_to = clip_to
        error = error or self._parked.error() or self._guard.untold() or self._follow_edits()
        self.progress.hypers = self._digest.of(self._param_groups, self._shown.dropped)
        try:
            self._follow_params()
        except UnsupportedParam as found:
            error = error or found
        try:
            grads = self.reduction.finish(error or self.placement.conflict())
        except StepFailed:
            self._owed = True
            raise
        if self.progress.absentees:
            follow_hypers(self.agreement.group, self._param_groups, self.progress.absentees)
        if not self.progress.same_hypers:
            self.agreement.on_contents(edit_contents(self._param_groups, map(self._describe, self._shown.dropped)))
        return grads

    def shadow_step(self) -> None:
        """A step on a rank that has run out of inputs: it contributes zeros, and steps its shard. Collective."""
        self.progress.absent = True
        try:
            for param in self._params:
                param.grad = None
            self.reduction.reset()
            grads = self.finish()
            while self.progress.clip_to is not None:
                self.clip(grads, self.progress.clip_to)
                grads = self.finish()
            self.take(grads)
        finally:
            self.progress.absent = False

    def take(self, grads: Sequence[GradShard], grad_scale: float = 1.0) -> None:
        """Step this rank's slices with reduced gradients, and gather the updated parameters. Collective.

        Args:
            grad_scale: what gradients are multiplied by first.

        Raises:
            NonFiniteGradient: on every rank, before anything is changed. StepFailed: see :meth:`stepped`.
        """
        limit, look = self._recipe.max_grad_norm, cache(partial(self.measure, grads))
        grad_scale *= self.reduction.grad_scale
        if self._nonfinite.skips(look):
            self.progress.skipped()
            return
        if limit is not None:
            grad_scale *= float(clip_factor(look().norm * grad_scale, limit))
        with self._guard.whole():
            self.stepped(self.gather.run(self.progress.step, self.step(grads, grad_scale), self._guard.lacks))

    def _follow_params(self) -> None:
        moved = self.partition.refresh()
        if moved:
            self.placement.repoint(moved)
            self.gather.forget()

    def _follow_edits(self) -> ZeroOptError | None:
        """Take over what the user has done to ``state`` and ``param_groups``, or say why that cannot be."""
        try:
            self.planned.require()
            self._shown.adopt(self._params)
        except ZeroOptError as error:
            return error
        return None

    def clip(self, grads: Sequence[GradShard], max_norm: float) -> Tensor:
        """Scale the reduced gradients to a global L2 norm of at most ``max_norm``; the norm before. Collective.

        Gradients that no step is to be taken with are left as they are.
        """
        measured = self.measure(grads)
        norm = measured.norm * self.reduction.grad_scale
        if not self._nonfinite.skips(lambda: measured):
            widened = any(map(self._recipe.widens, self.partition.buckets))
            (self.reduction.scale_in_step if widened else self.reduction.scale)(clip_factor(norm, max_norm))
        return norm

    def measure(self, grads: Sequence[GradShard]) -> Measured:
        """Global L2 norm of the reduced gradients, and whether they are finite. Collective."""
        params = [piece.param for shard in grads for piece in shard.slices]
        known = [sums for shard in grads for sums in self.partition.buckets[shard.bucket].squares()]
        return measure([grad for shard in grads for grad in shard.grads], params, self._groups.control, known)

    def step(self, grads: Sequence[GradShard], grad_scale: float) -> Iterator[GradBucket]:
        """Step this rank's shards; yields every bucket that is updated once it is up to date here.

        If the placement fails they come as they are, because the other ranks wait for them: :meth:`stepped` raises.
        """
        buckets = self.partition.buckets
        left = list(self.placement.landing(grads))
        if self._owed:
            left += [index for index in range(len(buckets)) if index not in left]
        try:
            self._guard.begin(self._patience_s)
            self._guard.failed(None)
            for index in self.placement.step(grads, self._param_groups, grad_scale):
                left.remove(index)
                yield buckets[index]
        except Exception as error:  # whatever it is
            self._guard.failed(error)
        yield from (buckets[index] for index in left)
        self._owed = False

    def stepped(self, failed: Sequence[int]) -> None:
        """A step is done. Collective where it has failed on some ranks.

        Args:
            failed: those of the ranks that every rank knows of.

        Raises:
            Exception: the step failed on this rank. StepFailed: it failed on another. Ranks that do not know of the
                failure raise StepFailed later.
        """
        failure = self._guard.failure
        self.reduction.stepped()
        self.progress.stepped()
        self._groups.control.in_step(self.progress.step)
        self.partition.settle()
        self._guard.commit(self.progress.step)
        if failure is None:
            self._shown.stepped(self.progress.used)
            self._show_state()
        if failed:
            self._owed = True
            self.agreement.raise_first_error(self._guard.lacking(), "step()", own=failure)
        if failure is not None:
            raise failure

    def flush(self) -> None:
        """Let parameters arrive, and bring a pending step into them. Collective.

        Raises:
            StepPending: on every rank, if a parameter was changed on one meanwhile; it keeps the change.
            StepFailed: on every rank, if the last step failed on one, which :meth:`stepped` could not tell.
            WorkerDied, WorkerFailed, StorageFailed: on every rank, if one cannot take the step; it stays pending there.
        """
        self.placement.require_own()
        self.gather.flush()
        if self._recipe.offload is not None:
            self._land()
        if self.gather.failed():
            self.agreement.raise_first_error(self._guard.lacking(), "flush()")

    def _land(self) -> None:
        conflict: ZeroOptError | None = None
        begun = False
        try:
            with self.agreement.together("flush()"):
                self._follow_params()
                conflict = self.placement.conflict()
                begun = self.placement.pending
                self._owed |= begun
                with self._guard.making_up(self._patience_s) if begun else nullcontext():
                    list(self.placement.land())
        except Exception as error:
            self._owed = True
            if begun and not isinstance(error, PeerLost):
                self._guard.take_back()
            raise
        if self.agreement.any(self._owed):
            spread(self.partition.buckets, self._groups.control)
            self._owed = False
            self.gather.made_up_for()
            self._guard.commit(self.progress.step)
            self._shown.landed()
            self._show_state()
        self.agreement.raise_first_error(conflict)

    def leave_device(self) -> None:
        """Bring what is kept on the parameters' device beside them to host memory, and let go of staging."""
        self.gather.flush()
        # Gradients that a step will use stay: they may be still on their way, as long as other ranks like.
        leaves = not self.reduction.shards_count and self._thread.idle_within(_IDLE_S)
        for bucket in self.partition.buckets:
            if leaves:
                bucket.leave()
            bucket.forget_staging()
        self.gather.forget()
        self._pool.release()
        self._parked.leave(self.placement.resident())

    def come_back(self) -> None:
        """Undo :meth:`leave_device`, but for what is parked."""
        for bucket in self.partition.buckets:
            bucket.come_back()

    def memory_report(self) -> dict[str, int]:
        """Bytes on this rank of gradient shards, of staging, and of state that is not shown."""
        staging = self._pool.nbytes + sum(exchange.nbytes for exchange in self._exchanges.values())
        staging += self.placement.staging_nbytes
        shards = sum(bucket.shard_nbytes for bucket in self.partition.buckets)
        return {"grad_shards": shards, "staging": staging, "state": self.placement.spare_nbytes}

    def _show_state(self) -> None:
        """Let the user's ``state`` show this rank's live state under the user's parameters."""
        self._shown.show(self._params)

    def consolidate(self, to: int) -> None:
        """Bring the full state, a pending step included, to rank ``to``. Collective."""
        self._settle("consolidate_state_dict()")
        self._whole.consolidate(to)

    def rows(self) -> dict[int, dict[str, Any]]:
        """All state, a pending step included, cut by rows over the ranks. Collective."""
        self._settle("sharded_state_dict()")
        return self._whole.rows()

    def _settle(self, call: str) -> None:
        """Let state be what it is after the last step and the user's edits, on every rank."""
        self.flush()
        self.agreement.raise_first_error(self._guard.lacking() or self._follow_edits(), call)

    def full_state(self) -> dict[int, dict[str, Any]]:
        """The full state: what :meth:`consolidate` brought here, if still current, else pulled from the other ranks.

        It shares no memory with anything. Not collective: what other ranks have replaced or dropped in their ``state``
        is in it from their next step or consolidation on.
        """
        self._whole.require_landed()
        if not self._closed:
            self.gather.flush()  # where state was replaced, masters may be taken from parameters
        conflict = None if self._closed else self._follow_edits()
        if isinstance(conflict, ParamsReplaced):
            self.require_replaceable()  # the new parameters have no state yet; what is here is the planned ones'
        elif conflict is not None:
            raise conflict
        return self._whole.here(self._groups.service)

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Take this rank's slices out of state that has its full shape here, or over all ranks (DTensors)."""
        self.agreement.on_contents(loaded_contents(states, groups, self._describe))
        self.gather.flush()
        self._admit(sum(1 << index for index in states))
        mine = self._whole.own_part(states)
        self._guard.begin(self._patience_s)
        with self._guard.whole(), self.agreement.together():  # a disk may have failed since that was checked
            self.placement.load(mine, groups)
        for group, loaded in zip(self._param_groups, groups, strict=True):
            group.update(copy.deepcopy(hypers_of(loaded)))  # an lr may be a tensor, to be written in place
        self._shown.load(states)
        self._show_state()
        self._loaded = self._loaded or bool(states)
        self._guard.failed(None)
        self.gather.made_up_for()
        self._guard.commit(self.progress.step)

    def close(self) -> None:
        """Let parameters arrive, stop listening and destroy the groups, all of it whatever fails meanwhile."""
        self._whole.close()
        self._closed = True
        with ExitStack() as last_first:
            last_first.callback(self._groups.close)
            last_first.callback(close_all, self._exchanges)
            last_first.callback(self._end_collectives)
            last_first.callback(self.placement.close)
            last_first.callback(self._thread.close)
            last_first.callback(self.reduction.close)
            last_first.callback(self.gather.close)
            if self._groups.service is not None:
                last_first.callback(self._groups.service.close)
            last_first.callback(self._end_pending)

    def _end_collectives(self) -> None:
        """Wait, for seconds at most, for what this rank has enqueued: its communicators are aborted next."""
        if not all(exchange.blocks for exchange in self._exchanges.values()):
            self.partition.join()
            wait_done([event for _, _, event in marks(self.partition.streams)])

    def _end_pending(self) -> None:
        """Bring a pending step in, or say that it is lost.

        Over several ranks it is lost: who closes may be the only one that does, and must not wait for the others.
        """
        if not self.placement.pending:
            return
        reason = "the other ranks need not be there"
        if self.partition.world_size == 1:
            try:
                with torch.no_grad():
                    self.flush()
                return
            except Exception as error:  # whatever it is, the rest is to be closed
                reason = str(error)
        _log.warning("close() has lost the update of a pending step (%s): call opt.flush() on every rank first", reason)
