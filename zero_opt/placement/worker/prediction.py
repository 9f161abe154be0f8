"""A worker with ``delay=1`` whose parameters are predictions, so that gradients are about those of the true ones.

A step writes predictions to ``out``, and the state that counts nowhere else than without them. So all that is here is
which parameters show predictions, and the way back to what they are rounded from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...reduction.interface import GradShard, ParamsByBucket, merged
from ...system.interrupts import uninterrupted
from ..masters import write_copies
from ..state_shard import StateShard
from .arena_shard import ArenaShard
from .placement import Pending, WorkerPlacement

_NO_STEP = Pending(None, {}, (), ())


class PredictedShard(ArenaShard):
    """A shard whose results are made beside what they are results of, whatever the parameters' dtype."""

    @property
    def _has_out(self) -> bool:
        return True

    def show_masters(self, positions: Sequence[int]) -> None:
        """Bring the masters themselves into parameters that the user has not written to."""
        left = [position for position in positions if not self.edited(position)]
        copies = [(self.param_run(position), self.master(position)) for position in left]
        write_copies([self.flats[position] for position in left], copies)


class PredictingPlacement(WorkerPlacement):
    """A worker's placement that brings steps into parameters as predictions, and as they are in :meth:`bring_in`."""

    shard_type = PredictedShard
    _shown = _NO_STEP  # the step of which parameters show predictions

    @property
    def predicts(self) -> bool:
        return len(self._shown.params) > 0

    def updated_params(self, grads: Sequence[GradShard]) -> ParamsByBucket:
        return merged(super().updated_params(grads), self._shown.params)

    def _bring_in_last(self) -> Iterator[int]:
        pending, shown = self._pending or _NO_STEP, self._shown
        yield from super()._bring_in_last()
        with uninterrupted():
            self._show_masters(shown, but=pending)
            self._shown = pending
        yield from (bucket for bucket in shown.params if bucket not in pending.params)

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

    def _unsettled(self) -> Iterable[tuple[StateShard, Sequence[int]]]:
        return [*super()._unsettled(), *self._shown.used]
