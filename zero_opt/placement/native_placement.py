"""The common part of placements that step natively, with its state in arrays of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigConflict, StepPending
from ..sharding.buckets import GradBucket
from ..system.failures import on_failure
from .compact_state import require_own_master, require_squares_of
from .interface import ParamState, SlicePlacement
from .masters import changed_while_pending
from .native_rules import loaded_roles, new_roles, require_fitting, require_placed, say_without_masters
from .read_through import ReadThrough
from .state_shard import Kept, StateShard


class PendingStep(Protocol):
    """A step whose result is not in the parameters yet."""

    @property
    def used(self) -> Iterable[tuple[StateShard, Sequence[int]]]:
        """What it steps: shards, and positions of their slices."""


ShardT = TypeVar("ShardT", bound=StateShard)
StepT = TypeVar("StepT", bound=PendingStep)


class NativePlacement(SlicePlacement[ShardT], Generic[ShardT, StepT]):
    """A placement whose state lies in arrays away from the parameters, one :class:`StateShard` per bucket.

    Subclasses say where the arrays lie, and how a step is taken and brought in.
    """

    _policy_name: str
    # Parts of messages, see :func:`changed_while_pending`.
    _cause = ""
    _remedy = "call opt.flush()"

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept
        self._roles: list[tuple[str, ...]] = []  # per group: which arrays have a place
        self._shards: dict[int, ShardT] = {}  # by bucket
        self._pending: StepT | None = None

    # -- for subclasses -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _place_missing(self) -> None:
        """Give a place to all arrays that the groups need and that have none yet."""

    @abstractmethod
    def _written(self) -> None:
        """Make what was written to the state last, and let autograd know of it."""

    def _drop_pending(self) -> None:
        """Wait for transfers that are under way, and forget the pending step."""
        self.wait()
        self._pending = None

    def _await_copies(self) -> None:
        """Return when no accelerator reads or writes the arrays."""

    # -- what there is ------------------------------------------------------------------------------------------------

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        self._roles.append(self._kept.update.roles(hypers))

    def drop_groups(self, kept: int) -> None:
        del self._roles[kept:]

    def lacks_room(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        return any(new_roles(self._policy_name, self._kept.update, groups, self._roles))

    def make_room(self, groups: Sequence[Mapping[str, Any]]) -> None:
        added = new_roles(self._policy_name, self._kept.update, groups, self._roles)
        pending = {shard.bucket.layout.group for shard, _ in self._unsettled()}
        for number in pending:
            for role in self._kept.update.needed(added[number]) if added[number] else ():
                if role in added[number]:
                    raise ConfigConflict(
                        f"param group {number}: {self._kept.update.switches[role]} cannot be switched on after the "
                        "first step, which is pending; set it back, or load a state dict that was saved with it"
                    )
        before = self._roles
        with on_failure(partial(setattr, self, "_roles", before)):
            self._roles = [(*roles, *more) for roles, more in zip(before, added, strict=True)]
            self._await_copies()
            self._place_missing()

    def _register(self, shards: Iterable[ShardT]) -> None:
        """Note which shard has which parameters, and make the masters of those that have state from the start."""
        for shard in shards:
            if shard.stepped and shard.shows_masters:
                shard.read_params(range(len(shard.pieces)))
                self._written()
            self._shards[shard.bucket.layout.index] = shard
            self._places.update({piece.param: (shard, at) for at, piece in enumerate(shard.pieces)})

    def drop(self, buckets: Sequence[GradBucket]) -> None:
        for bucket in buckets:
            self._shards.pop(bucket.layout.index, None)
            for index in bucket.layout.params:
                self._places.pop(index, None)

    def param_of(self, index: int) -> Tensor:
        shard, position = self._places[index]
        return shard.part(position)

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[int, ParamState]]:
        """Yield views of the arrays, of which nothing is read before the views are."""
        for index, (shard, position) in self._places.items():
            if position in shard.stepped:
                yield index, shard.state(position)

    def array_views(self) -> Iterator[tuple[int, Tensor]]:
        for shard in self._shards.values():
            yield from shard.array_views()

    def adopt_state(self, index: int, state: ParamState | None) -> bool:
        """Copy the values of an edited state to the arrays."""
        shard, position = self._places[index]
        if state is not None and not shard.replaced(position, state):
            if isinstance(state, ReadThrough):
                state.forget_live()
            return False
        if self._pending is not None:
            raise StepPending(
                f"the state of {shard.flats[position].label} was replaced while a step for it was pending; "
                f"{self._remedy} before that"
            )
        self._await_copies()
        require_own_master(shard.flats[position].label, state or {}, shard.form)
        shard.read_params([position])  # a master that is not in the new state is not of a parameter of before
        in_place = state if isinstance(state, ReadThrough) and state is shard.state(position) else None
        with nullcontext() if in_place is None else in_place.settled():
            saved = {} if state is None else shard.apart(position, state)
            require_fitting(shard.flats[position], shard.part(position).shape, saved, shard.update, shard.places())
            require_placed(shard.flats[position].label, saved, shard.update, shard.places())
            require_squares_of(shard.flats[position].label, saved, shard.form)
            if in_place is None:
                shard.forget_views(position)
            shard.load(position, saved)
        self._written()
        return in_place is None

    def require_counts(self) -> None:
        for shard in self._shards.values():
            for position, count in enumerate(shard.steps.tolist()):
                shard.next_step(position, count + 1)

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state; a step under way ends, and is forgotten."""
        self._drop_pending()
        self._await_copies()
        given = [(shard.bucket.layout.group, states.get(index, {})) for index, (shard, _) in self._places.items()]
        self._roles = loaded_roles(self._kept.update, groups, given)
        self._place_missing()
        without = 0
        for index, (shard, position) in self._places.items():
            saved = states.get(index, {})
            shard.load(position, saved)
            if "master" in saved:
                shard.distrust(position)
            without += bool(saved) and shard.param_dtype is not torch.float32 and "master" not in saved
        say_without_masters(without)
        self._written()

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        return self._pending is not None

    def _unsettled(self) -> Iterable[tuple[StateShard, Sequence[int]]]:
        """Return slices whose parameters are not what the state says: those of a pending step."""
        return () if self._pending is None else self._pending.used

    def conflict(self) -> StepPending | None:
        return changed_while_pending(self._unsettled(), self._remedy, self._cause)

    def ignore_writes(self) -> None:
        for shard, positions in self._unsettled():
            for position in positions:
                shard.follow(position)
