"""A worker with ``delay=1`` whose parameters are predictions, so that gradients are about those of the true ones.

A step writes predictions to ``out``, and the state that counts nowhere else than without them. So all that is here is
which parameters show predictions, and the way back to what they are rounded from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...comm.groups import Group
from ...errors import StepPending
from ...policies import AdamState, WorkerOffload
from ...reduction.interface import GradShard
from ...sharding.flat_param import own_writes
from ...system.interrupts import uninterrupted
from ..masters import changed_while_pending
from .arena_shard import ArenaShard
from .placement import Pending, WorkerPlacement

_NO_STEP = Pending(None, (), ())


class PredictedShard(ArenaShard):
    """A shard whose results are made beside what they are results of, whatever the parameters' dtype."""

    @property
    def _has_out(self) -> bool:
        return True

    def show_masters(self, positions: Sequence[int]) -> None:
        """Bring the masters themselves into parameters that the user has not written to."""
        left = [position for position in positions if not self.edited(position)]
        flats = [self.flats[position] for position in left]
        with own_writes(flats):
            if left:
                params = [self.param_run(position) for position in left]
                torch._foreach_copy_(params, [self.master(position) for position in left], non_blocking=True)
            for flat in flats:
                flat.store()


class PredictingPlacement(WorkerPlacement):
    """A worker's placement that brings steps into parameters as predictions, and as they are in :meth:`bring_in`."""

    _shard_type = PredictedShard

    def __init__(
        self,
        policy: WorkerOffload,
        defaults: Mapping[str, Any],
        group: Group,
        model: nn.Module | None,
        form: AdamState,
        grad_buffers: int,
    ) -> None:
        super().__init__(policy, defaults, group, model, form, grad_buffers)
        self._factor = policy.prediction
        self._shown = _NO_STEP  # the step of which parameters show predictions

    @property
    def _prediction(self) -> float:  # type: ignore[override]
        return self._factor if self._begun > self._warmup_steps else 0.0

    @property
    def predicts(self) -> bool:
        return len(self._shown.buckets) > 0

    def updated_buckets(self, grads: Sequence[GradShard]) -> Sequence[int]:
        due = super().updated_buckets(grads)
        return [*due, *(bucket for bucket in self._shown.buckets if bucket not in due)]

    def _bring_in_last(self) -> Iterator[int]:
        pending, shown = self._pending or _NO_STEP, self._shown
        yield from super()._bring_in_last()
        with uninterrupted():
            self._show_masters(shown, but=pending)
            self._shown = pending
        yield from (bucket for bucket in shown.buckets if bucket not in pending.buckets)

    def bring_in(self) -> Iterator[int]:
        yield from self._bring_in_last()
        with uninterrupted():
            self._show_masters(self._shown, but=_NO_STEP)
            self._shown = _NO_STEP

    def _show_masters(self, step: Pending, *, but: Pending) -> None:
        """Let parameters that a step has stepped, ``but`` for those of another, be what it has made of them."""
        left_out = {(shard, position) for shard, positions in but.used for position in positions}
        for shard, positions in step.used:
            assert isinstance(shard, PredictedShard)
            shard.show_masters([position for position in positions if (shard, position) not in left_out])
        self._note_copies(shard for shard, _ in step.used)

    def conflict(self) -> StepPending | None:
        return super().conflict() or changed_while_pending(self._shown.used, self._remedy, self._cause)

    def ignore_writes(self) -> None:
        super().ignore_writes()
        for shard, positions in self._shown.used:
            for position in positions:
                shard.follow(position)
