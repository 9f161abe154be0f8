"""What the user sees as ``state`` over several ranks, and what happens to what the user does to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .errors import ConfigConflict, StateDictError, ZeroOptError
from .layout import ParamSlice
from .partition import Partition
from .placement import ParamState, Placement
from .stand_ins import Kind, StandIns
from .state_dict import cut


class ShownState:
    """Keeps ``owner.state`` and the live state in step. Nothing here is collective.

    Every rank shows an entry for every parameter that has state on any: the live one of its slice, or, where it has no
    slice, tensors without elements and the owner's scalars.
    """

    def __init__(
        self, owner: torch.optim.Optimizer, stand_ins: StandIns, partition: Partition, placement: Placement
    ) -> None:
        self._owner, self._stand_ins = owner, stand_ins
        self._partition, self._placement = partition, placement
        self._groups_checked: object = owner.param_groups
        self._due: list[int] = []

    def add(self, elsewhere: Mapping[int, Kind]) -> None:
        """Parameters were planned of which this rank has no slice, by global index."""
        self._stand_ins.add(elsewhere, self._owner.param_groups)

    def show(self, params: Sequence[Tensor]) -> None:
        """Let ``owner.state`` have an entry for everything that has state."""
        state = self._owner.state
        for index, live in self._placement.state():
            if state.get(params[index]) is not live:
                state[params[index]] = live
        for index, shown in self._stand_ins.shown():
            if params[index] not in state:
                state[params[index]] = dict(shown)

    def stepped(self, params: Sequence[Tensor], used: int) -> None:
        """A step was taken in which the masked parameters had gradients; a pending one counts when the next lands."""
        self._due.append(used)
        self._follow(params, len(self._due) - int(self._placement.pending))

    def landed(self, params: Sequence[Tensor]) -> None:
        """No step is pending any more."""
        self._follow(params, len(self._due))

    def _follow(self, params: Sequence[Tensor], count: int) -> None:
        due, self._due = self._due[:count], self._due[count:]
        for used in due:
            for index in self._stand_ins.step(used, self._owner.param_groups):
                self._owner.state.pop(params[index], None)

    def load(self, states: Mapping[int, Mapping[str, object]]) -> None:
        """All state was replaced, by this, per global index and in full shape."""
        self._due.clear()
        self._owner.state.clear()
        self._stand_ins.load(states, self._owner.param_groups)

    def require_params(self, params: Sequence[Tensor]) -> None:
        """Raise ConfigConflict if ``owner.param_groups`` was replaced by groups of other parameters."""
        groups = self._owner.param_groups
        if groups is self._groups_checked:
            return
        held = [param for group in groups for param in group["params"]]
        if len(held) != len(params) or any(a is not b for a, b in zip(held, params, strict=True)):
            raise ConfigConflict("param_groups was replaced by groups of other parameters; use add_param_group()")
        self._groups_checked = groups

    def adopt(self, params: Sequence[Tensor]) -> None:
        """Take over entries of ``owner.state`` that were added, replaced or dropped.

        Tensors may have the parameter's shape, of which this rank's slice is taken.

        Raises:
            StepPending: state was replaced while a step was pending. StateDictError: what it was replaced by.
        """
        state, live = self._owner.state, dict(self._placement.state())
        try:
            changed = [
                piece.param
                for piece in self._partition.owned()
                if self._adopt_slice(piece, state.get(params[piece.param]) or None, live.get(piece.param))
            ]
            for index in self._stand_ins:
                if self._stand_ins.adopt(index, state.get(params[index]) or None, self._owner.param_groups):
                    state.pop(params[index], None)
                    changed.append(index)
            if changed:
                self.show(params)
        except ZeroOptError:
            raise
        except Exception as error:
            raise StateDictError(f"opt.state was edited into what cannot be stepped: {error}") from error

    def _adopt_slice(self, piece: ParamSlice, entry: ParamState | None, live: ParamState | None) -> bool:
        """Whether other objects than ``entry`` are to be shown of this rank's slice."""
        if not (entry or live):
            return False
        flat = self._partition.flats[piece.param]
        if entry and piece.in_param.numel != flat.param.numel():
            shape = flat.param.shape
            full = {key: value for key, value in entry.items() if isinstance(value, Tensor) and value.shape == shape}
            entry.update(cut(full, piece, flat))
        return self._placement.adopt(piece.param, entry)
