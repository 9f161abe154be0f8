"""A worker that begins a bucket's step during backward, before it is known whether that will be the step.

[Note: drafts]
As soon as a bucket is reduced into the arena, a *draft* of its step is submitted: with the hyperparameters of this
moment, as if nothing were clipped, from the bank of state that counts into the other one. At ``step()`` it is known
what the step is. If it is what was drafted, the other banks count from then on; if not, all drafts are void, and the
same runs are made once more, with what is known by then. So no draft changes anything that counts, and there is nothing
to undo. What would make a draft another step, each of which is looked for:

- hyperparameters that have been edited, state or parameters that were written to: by value, and by version counters;
- a loaded master, which counts only where the parameter is what it rounds to: the step looks at the parameter first;
- a shard that is reduced into again (a second backward) or multiplied (clipped, unscaled): the bucket tells its reader;
- a step that clips (``max_grad_norm``).

A GradScaler multiplies by one over the loss scale, which seldom changes: fp32 gradients are drafted as if multiplied
by that of the last two steps, and the product is rounded once either way. Speculation is each rank's own: what it
decides by is either local or the same on all ranks.

The shard of a bucket on an accelerator is copied to the arena at once (see [Note: early copies]); a thread waits for
it, and submits the draft then. ``step()`` waits for copies that are under way.

Where the last step asked for a norm, the worker sums the squares of a shard before it makes the draft: the norm is then
the sum of these. What is drafted or not, sums are of use to the step, as long as the shard is what it was. On an
accelerator the norm is made there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...comm.groups import Group
from ...errors import OutOfResources, ZeroOptError
from ...kernels.runs import RunBatch
from ...kernels.updates import StepHypers
from ...policies import WorkerOffload
from ...reduction.interface import GradShard, used_params
from ...sharding.buckets import GradBucket
from ...system.background_thread import SerialThread
from ...system.devices import is_host
from ...system.extension import native
from ..state_shard import Kept
from .arena_shard import ArenaShard
from .banked_shard import BankedShard
from .placement import Pending, WorkerPlacement
from .results import Used

# Drafts wait for the norm while more than half of so many steps have been clipped.
_RECENT_STEPS = 8


class _Step(NamedTuple):
    """All that a step of a bucket depends on but its gradient, its parameters and the clip factor.

    Attributes:
        unscale: what gradients are multiplied by.
        versions: of the state.
    """

    hypers: StepHypers
    roles: tuple[str, ...]
    flush_denormals: bool
    unscale: float
    versions: tuple[int, int]


class _Draft(NamedTuple):
    """A step that was submitted before it was called for; ``drafted`` is how many drafts there were with it."""

    step: _Step
    drafted: int


class _Factors:
    """What gradients have been multiplied by before recent steps, and will be before the next one.

    Attributes:
        expected: the first factor of the last two steps, if they are the same: one over the loss scale.
    """

    def __init__(self) -> None:
        self.expected = 1.0
        self._first = 1.0
        self._clipped = deque([False] * _RECENT_STEPS, maxlen=_RECENT_STEPS)

    @property
    def mostly_clipped(self) -> bool:
        """Whether more than half of the recent steps were."""
        return 2 * sum(self._clipped) > _RECENT_STEPS

    def learn(self, factors: Sequence[float], grad_scale: float) -> None:
        """A step is taken, before which gradients were multiplied by ``factors``, and by ``grad_scale`` within it."""
        first = factors[0] if factors else 1.0
        clipped = grad_scale != 1.0 or len(factors) > 1 or (bool(factors) and first != self._first)
        self._clipped.append(clipped)
        self.expected = first if first == self._first else 1.0
        self._first = first


class SpeculativePlacement(WorkerPlacement):
    """A worker's placement that begins steps during backward; see [Note: drafts].

    The reader of all its buckets. Drafts are submitted on the exchange thread or, for shards on an accelerator, on a
    thread of their own. The lock is held while a run is bound and submitted, not during waits for the worker.

    Attributes:
        kept, redone: how many buckets' drafts became steps, and how many were void at ``step()``.
    """

    shard_type = BankedShard

    def __init__(
        self,
        policy: WorkerOffload,
        defaults: Mapping[str, Any],
        group: Group,
        model: nn.Module | None,
        kept: Kept,
        grad_buffers: int = 1,
    ) -> None:
        super().__init__(policy, defaults, group, model, kept, grad_buffers)
        self.kept = self.redone = 0
        self._groups: list[Mapping[str, Any]] = []  # the user's, of which a draft takes the values as it is made
        self._drafts: dict[int, _Draft] = {}
        self._summed: dict[int, int] = {}  # by bucket: how many drafts there were with its sums
        self._waits = SerialThread("zero_opt drafts")  # which waits for copies from accelerators
        self._asked = self._sums = False  # for sums: since the last step, in the one before
        self._as_zero = native.flushes_denormals()
        self._factors = _Factors()
        self._flushes = self._flush_denormals

    # -- what there is ------------------------------------------------------------------------------------------------

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        super().add_group(hypers)
        self._groups.append(hypers)

    def drop_groups(self, kept: int) -> None:
        super().drop_groups(kept)
        del self._groups[kept:]

    def _reads(self, shard: ArenaShard) -> bool:  # noqa: ARG002
        return True

    def _stop_reading(self) -> None:
        super()._stop_reading()
        self._waits.close()  # nobody submits to it any more

    # -- during backward ----------------------------------------------------------------------------------------------

    def _read(self, shard: ArenaShard) -> None:
        """Draft the bucket's step, unless that is likely to be in vain."""
        if self._pending is not None:
            return
        self._copy(shard)
        if shard.reduced.copied and self._may(shard):
            with suppress(OutOfResources):  # of threads: the step is not drafted
                self._waits.submit(self._draft_arrived, shard, shard.reduced.writes, self._copies)
        elif self._at_home(shard):
            if self._sums:
                self._sum(shard)
            if self._may(shard):
                self._draft(shard)

    def _at_home(self, shard: ArenaShard) -> bool:
        """Whether the worker can read the gradient where it was reduced."""
        bucket = shard.bucket
        return shard.grads_in_arena and bucket.shard.data_ptr() == bucket.in_arena.data_ptr()

    def _draft_arrived(self, shard: ArenaShard, writes: int, copies: Sequence[Any]) -> None:
        """Draft a bucket's step once copies to and from the arena are over, unless the gradient has changed since."""
        for event in copies:
            event.synchronize()
        with self._lock:
            reduced = shard.reduced
            if reduced.copied and reduced.writes == writes and reduced.factors in ([], [self._factors.expected]):
                self._draft(shard)

    def _may(self, shard: ArenaShard) -> bool:
        """Whether a draft can be the step, as far as can be seen."""
        unscale = self._factors.expected
        return (
            not self._factors.mostly_clipped
            and (unscale == 1.0 or (unscale < 1.0 and shard.grad_dtype is torch.float32))
            and not any(map(shard.to_read, range(len(shard.pieces))))
        )

    def _sum(self, shard: ArenaShard) -> None:
        assert isinstance(shard, BankedShard)
        home = shard.bucket.in_arena
        grads = [home[slice(*piece.in_shard)] for piece in shard.pieces]
        with suppress(OverflowError):  # then they are summed when they are asked for
            self._summed[shard.bucket.layout.index] = self._worker.draft_sums(
                grads, shard.squares, flush_denormals=self._as_zero
            )

    def squares(self, bucket: GradBucket) -> Sequence[Tensor | None]:
        """Sums of squares of the shard that the worker has made; does not wait for those that are not there yet."""
        index = bucket.layout.index
        with self._lock:
            self._asked = True
            shard, summed = self._shards.get(index), self._summed.get(index)
            done = summed is not None and self._worker.control.drafts_done >= summed
            if not done or not isinstance(shard, BankedShard) or native.flushes_denormals() != self._as_zero:
                return super().squares(bucket)
            return super().squares(bucket) if shard.reduced.factors else shard.squares

    def _draft(self, shard: ArenaShard) -> None:
        index = shard.bucket.layout.index
        self._delivery.await_result(index)  # of narrower parameters there is one place for results
        try:
            step = self._step_of(shard, self._groups[shard.bucket.layout.group], self._factors.expected)
            if any(role not in shard.places() for role in step.roles):
                return  # step() makes room
            runs = list(shard.runs(range(len(shard.pieces)), step.roles))
            batch = (step.hypers.for_kernel(step.unscale), [run for run, _ in runs], [grad for _, grad in runs])
            drafted = self._worker.draft([batch], flush_denormals=step.flush_denormals)
        except (ZeroOptError, ValueError, TypeError, KeyError, OverflowError):
            return  # what is wrong with the hyperparameters, and whether it still is, is for step() to say
        self._drafts[index] = _Draft(step, drafted)

    def _step_of(self, shard: ArenaShard, group: Mapping[str, Any], unscale: float) -> _Step:
        versions = (self._worker.arena.bytes._version, shard.steps._version)
        hypers, roles = self._kept.update.hypers(group), self._kept.update.roles(group)
        return _Step(hypers, roles, self._flushes, unscale, versions)

    def rewrites(self, bucket: GradBucket) -> None:
        with self._lock:
            super().rewrites(bucket)
            if bucket.layout.index in self._drafts or bucket.layout.index in self._summed:
                self._void_drafts()

    def scales(self, bucket: GradBucket, factor: float) -> None:
        index = bucket.layout.index
        with self._lock:
            super().scales(bucket, factor)
            draft = self._drafts.get(index)
            if draft is not None and self._shards[index].reduced.factors != [draft.step.unscale]:
                self._void_drafts()
                draft = None
        if draft is not None and is_host(bucket.device):  # the worker may still read what is multiplied
            try:
                self._worker.wait_drafts(draft.drafted)
            except ZeroOptError:  # for step() to say, where the other ranks hear of it
                with self._lock:
                    self._void_drafts()

    def _void(self) -> None:
        super()._void()
        self._void_drafts()

    def _void_drafts(self) -> None:
        """Let no draft count, and no sums; what the worker still writes is not read."""
        if self._drafts or self._summed:
            self._worker.control.void_drafts()
            self._drafts.clear()
            self._summed.clear()

    # -- steps --------------------------------------------------------------------------------------------------------

    def figures(self) -> Mapping[str, float]:
        return {**super().figures(), "worker/drafts_kept": float(self.kept), "worker/drafts_redone": float(self.redone)}

    def _submit(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Pending:
        if grad_scale == 1.0:
            self._waits.idle_within(self._policy.hang_timeout)  # if it is not, there are no drafts of what has not come
        with self._lock:
            self._groups = list(groups)  # the user may have put others in the place of those that were added
            self._as_zero = native.flushes_denormals()
            self._flushes = self._flush_denormals or self._as_zero
            self._sums, self._asked = self._asked, False
            used = {shard.bucket: Used(self._shards[shard.bucket], shard.with_grad) for shard in grads}
            drafted = {index: one for index, one in used.items() if one.positions and index in self._drafts}
            if not all(self._was_drafted(one, groups, grad_scale) for one in drafted.values()):
                self.redone += len(drafted)
                drafted = {}
            self.kept += len(drafted)
            self._learn(grads, grad_scale)
            if not drafted:
                self._void_drafts()
            try:
                made = super()._submit([shard for shard in grads if shard.bucket not in drafted], groups, grad_scale)
            except BaseException:
                self._void_drafts()
                raise
            for shard, _ in drafted.values():
                shard.lend_grads()
            self._drafts.clear()
            self._summed.clear()
            # All that was submitted ends before a result is brought in: then the banks that do not count are free.
            sequence = self._worker.control.drafted if drafted or made.sequence is not None else None
            numbers = [shard.next_steps(positions) for shard, positions in drafted.values()]
            stepped = [*made.used, *drafted.values()]
            return Pending(sequence, used_params(grads), stepped, [*made.numbers, *numbers])

    def _was_drafted(self, used: Used, groups: Sequence[Mapping[str, Any]], grad_scale: float) -> bool:
        """Whether a draft of a bucket is the step that is to be taken."""
        shard, positions = used
        draft = self._drafts[shard.bucket.layout.index].step
        unscaled = shard.reduced.factors == ([] if draft.unscale == 1.0 else [draft.unscale])
        return (
            grad_scale == 1.0
            and unscaled
            and draft == self._step_of(shard, groups[shard.bucket.layout.group], draft.unscale)
            and not any(map(shard.to_read, positions))
        )

    def _learn(self, grads: Sequence[GradShard], grad_scale: float) -> None:
        """A step is taken: what it was multiplied by."""
        scaled = next((self._shards[shard.bucket].reduced.factors for shard in grads if shard.used), None)
        if scaled is not None:
            self._factors.learn(scaled, grad_scale)

    def _send(self, batches: Sequence[RunBatch]) -> int:
        try:
            return self._worker.draft(batches, flush_denormals=self._flushes)
        except OverflowError:  # void drafts still have a place
            self._worker.wait_drafts(self._worker.control.drafted)
            return self._worker.draft(batches, flush_denormals=self._flushes)

    def _await(self, sequence: int) -> None:
        self._worker.wait_drafts(sequence)
