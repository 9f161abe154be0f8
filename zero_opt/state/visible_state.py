"""What the user sees as ``state`` over several ranks, and what happens to what the user does to it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..errors import StateDictError, ZeroOptError
from ..layout import ParamSlice
from ..placement import ParamState, Placement, ReadThrough
from ..sharding.partition import Partition
from .stand_ins import Kind, StandIns
from .state_dict import cut


class Owner(Protocol):
    """What has the user's param groups and state: the optimizer, or a view of it."""

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]:
        """See ``torch.optim.Optimizer``."""

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """See ``torch.optim.Optimizer``."""


class ShownState:
    """Keeps ``owner.state`` and the live state in step. Nothing here is collective.

    Every rank shows an entry for every parameter that has state on any: the live one of its slice, or, where it has no
    slice, tensors without elements and the owner's scalars.

    Attributes:
        dropped: parameters whose entries the user has dropped since the last step.
        lock: what is done under it looks to other threads, which may read state at any time, as if done at once.
    """

    def __init__(self, owner: Owner, stand_ins: StandIns, partition: Partition, placement: Placement) -> None:
        self._owner, self._stand_ins = owner, stand_ins
        self._partition, self._placement = partition, placement
        self._due: list[int] = []
        self._pieces: Sequence[ParamSlice] = ()  # this rank's
        self._live: dict[int, ParamState] = {}  # as shown, by global index
        self.dropped: set[int] = set()
        self.lock = threading.RLock()

    def add(self, added: Mapping[int, Kind]) -> None:
        """Take in planned parameters, by global index; those without a slice on this rank get stand-ins."""
        self._pieces = self._partition.owned()
        mine = {piece.param for piece in self._pieces}
        elsewhere = {index: kind for index, kind in added.items() if index not in mine}
        self._stand_ins.add(elsewhere, self._owner.param_groups)

    def show(self, params: Sequence[Tensor]) -> None:
        """Let ``owner.state`` have an entry for everything that has state."""
        state = self._owner.state
        for index, live in self._placement.state():
            if self._live.get(index) is not live:
                state[params[index]] = self._live[index] = live
        for index, shown in self._stand_ins.news():
            if shown:
                state[params[index]] = dict(shown)
            else:
                state.pop(params[index], None)

    def stepped(self, used: int) -> None:
        """A step was taken in which the masked parameters had gradients; a pending one counts when the next lands."""
        self.dropped.clear()
        self._due.append(used)
        self._follow(len(self._due) - int(self._placement.pending))

    def landed(self) -> None:
        """No step is pending any more."""
        self._follow(len(self._due))

    def _follow(self, count: int) -> None:
        due, self._due = self._due[:count], self._due[count:]
        for used in due:
            self._stand_ins.step(used, self._owner.param_groups)

    def load(self, states: Mapping[int, Mapping[str, object]]) -> None:
        """All state was replaced, by this, per global index and in full shape."""
        self._due.clear()
        self.dropped.clear()
        self._owner.state.clear()
        self._live.clear()
        self._stand_ins.load(states, self._owner.param_groups)

    def adopt(self, params: Sequence[Tensor]) -> None:
        """Take over entries of ``owner.state`` that were added, replaced or dropped.

        Tensors may have the parameter's shape, of which this rank's slice is taken.

        Raises:
            StepPending: state was replaced while a step was pending. StateDictError: what it was replaced by.
        """
        state = self._owner.state

        def entry_of(index: int) -> ParamState | None:
            return state.get(params[index]) or None

        try:
            changed = [piece for piece in self._pieces if self._adopt_slice(piece, entry_of(piece.param))]
            edited = self._stand_ins.adopt(entry_of, self._owner.param_groups)
            self.dropped.update(index for index, entry in edited.items() if entry is None)
            if edited or changed:
                self.show(params)
        except ZeroOptError:
            raise
        except Exception as error:
            raise StateDictError(f"opt.state was edited into what cannot be stepped: {error}") from error

    def _adopt_slice(self, piece: ParamSlice, entry: ParamState | None) -> bool:
        """Whether other objects than ``entry`` are to be shown of this rank's slice."""
        if not (entry or self._live.get(piece.param)):
            return False
        if entry is None:
            self.dropped.add(piece.param)
        flat = self._partition.flats[piece.param]
        if entry and not isinstance(entry, ReadThrough) and piece.in_param.numel != flat.param.numel():
            shape = flat.param.shape
            full = {key: value for key, value in entry.items() if isinstance(value, Tensor) and value.shape == shape}
            entry.update(cut(full, piece, flat))
        others = self._placement.adopt_state(piece.param, entry)
        if others or entry is None:
            self._live.pop(piece.param, None)
        else:
            self._live[piece.param] = entry
        return others
