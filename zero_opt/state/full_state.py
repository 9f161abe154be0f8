"""The full state of a sharded optimizer: brought to one rank, cut by rows over all, or cut into this rank's slices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..comm.agreement import Agreement
from ..comm.connecting import require_descriptors
from ..errors import OptimizerClosed, StateNotConsolidated, StepPending
from ..placement import ParamState, Placement
from ..sharding.flat_param import is_dtensor
from ..sharding.partition import Partition
from .consolidate import consolidated
from .guard import StateGuard
from .kept_state import KeptState
from .service import StateService
from .state_dict import StatesByIndex, copied, cut
from .usual_states import UsualStates

if TYPE_CHECKING:
    from .row_sharded import ShardedState

# The most files that an import has open at one time, with some to spare.
_IMPORT_DESCRIPTORS = 8


def require_importable() -> None:
    """Raise OutOfResources if ``row_sharded`` is yet to be imported, and files cannot be opened for that.

    The import loads much of torch, which may not be importable again once an import has failed half-way.
    """
    if f"{__package__}.row_sharded" not in sys.modules:
        require_descriptors(_IMPORT_DESCRIPTORS, "the first import of torch.distributed.tensor needs")


class FullState:
    """The state of all ranks. Methods are collective, but for :meth:`here`, :meth:`close` and :meth:`require_landed`.

    :meth:`here` may be called on any thread; :meth:`require_landed` and :meth:`here` also after :meth:`close`.
    """

    def __init__(
        self,
        agreement: Agreement,
        partition: Partition,
        placement: Placement,
        guard: StateGuard,
    ) -> None:
        self._agreement, self._partition, self._placement, self._guard = agreement, partition, placement, guard
        self._kept, self._kept_at = KeptState(), 0  # and the changes then
        self._final: StatesByIndex | None = None  # what was kept, and current, when this was closed
        self._closed = False

    def consolidate(self, to: int) -> None:
        """Bring the full state to rank ``to``, where :meth:`here` returns it until something changes it."""
        self._kept.forget()  # not two at a time
        state = consolidated(self._agreement, self._partition, self._placement, to)
        self._kept_at = self._guard.changes
        if state is not None:
            self._kept.keep(state, self._live())

    def _live(self) -> Iterator[ParamState]:
        return (state for _, state in self._placement.state())

    def forget(self) -> None:
        """Let go of what :meth:`consolidate` brought here, and of the live state then: other state takes its place."""
        self._kept.forget()

    def _current(self) -> StatesByIndex | None:
        """Return what :meth:`consolidate` brought here, if it is current still; after :meth:`close`, if it was then."""
        if self._closed:
            return self._final
        return self._kept.current(self._live()) if self._kept_at == self._guard.changes else None

    def close(self) -> None:
        """Give up the live state: what :meth:`consolidate` brought here stays current if it is."""
        self._final = self._current()
        self._closed = True
        self.forget()

    def require_landed(self) -> None:
        """Raise an error if the state lacks a pending step.

        Raises:
            StepPending, OptimizerClosed: a step is pending. PeerLost: and a rank has left, without which it stays so.
            StepDesync: a step is under way.
        """
        if self._placement.pending and self._closed:
            raise OptimizerClosed("this ShardedOptimizer was closed while a step was pending, whose update is lost")
        if self._placement.pending:
            self._guard.require_readable()
            left = self._agreement.group.explain("", 0.0)
            if left is not None:
                raise type(left)(f"a step is pending, and flush() cannot bring it in: {left}")
            raise StepPending(
                "a step is pending, so state and parameters are not those after it; call opt.flush(), or "
                "opt.consolidate_state_dict(to=rank), on every rank before opt.state_dict()"
            )

    def here(self, service: StateService | None) -> StatesByIndex:
        """Return a copy of the full state: what :meth:`consolidate` brought, if current, else pulled from all ranks."""
        kept = self._current()
        if kept is not None:
            return copied(kept)
        if self._partition.world_size == 1:
            return self._own()
        if service is not None:
            return service.pull()
        raise StateNotConsolidated(
            "this rank holds only its shard of the optimizer state; call opt.consolidate_state_dict(to=rank) on "
            "every rank, after the last step, then opt.state_dict() on that rank"
        )

    def _own(self) -> StatesByIndex:
        """Return the full state at world size 1, on any thread. Steps wait for it."""
        with self._guard.reading(), self._guard.after_change(self._guard.here()):
            failed = self._guard.missing_part()
            if failed is not None:
                raise failed
            return consolidated(self._agreement, self._partition, self._placement, 0) or {}

    def rows(self, *, compact: bool) -> StatesByIndex:
        """Return all state cut by rows over the ranks, in host memory; compact state as it is, if asked for."""
        return self._by_rows().snapshot(compact=compact)

    def _by_rows(self) -> ShardedState:
        """Return the object that moves rows. Collective.

        Raises:
            OutOfResources: on every rank, if one lacks descriptors for the import.
        """
        with self._agreement.together():
            require_importable()
            from .row_sharded import ShardedState  # takes seconds to import, and few need it

        return ShardedState(self._agreement, self._partition, self._placement)

    def own_part(self, states: Mapping[int, Mapping[str, Any]]) -> Mapping[int, Mapping[str, Any]]:
        """Return this rank's slices of state that has its full shape here, or is cut over all ranks (DTensors)."""
        usual = isinstance(states, UsualStates)
        if not usual and any(is_dtensor(value) for state in states.values() for value in state.values()):
            return self._by_rows().shards(states)
        flats, pieces = self._partition.flats, [piece for piece in self._partition.owned() if piece.param in states]
        whole = [piece.param for piece in pieces if usual and piece.in_param.numel == flats[piece.param].numel]
        parts = copied({index: states[index] for index in whole})
        for piece in pieces:
            if piece.param not in parts:
                parts[piece.param] = cut(states[piece.param], piece, flats[piece.param])
        return parts
