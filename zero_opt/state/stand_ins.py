"""State of parameters that lie wholly on other ranks: no elements, and the scalars that their owners have.

Step counts, and whatever else a class keeps as numbers, follow from hyperparameters and from how often a parameter was
used, not from its values. So a few zeros, stepped whenever the parameters they stand for are used, have the owners'
scalars to the bit, and nothing needs to be sent. One stand-in serves all parameters that were used alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..placement import PlacementPolicy
from ..sharding.param_groups import hypers_of
from .state_dict import apart
from .trial import Trial, is_known


class Kind(NamedTuple):
    """What a stand-in must share with its parameters.

    Attributes:
        group: number of the param group. dims: of a parameter, whose state may depend on it.
    """

    group: int
    dims: int
    dtype: torch.dtype
    device: torch.device


def kinds_of(policy: PlacementPolicy, params: Iterable[tuple[int, int, Tensor]]) -> dict[int, Kind]:
    """Return the kinds of stand-ins for ``params``, which are (global index, number of the group, parameter).

    By global index, without parameters that are stepped by columns.
    """
    return {
        index: Kind(group, param.dim(), *policy.stepped_as(param))
        for index, group, param in params
        if not policy.steps_by_columns(param)
    }


@dataclass(eq=False)
class _StandIn:
    kind: Kind
    trial: Trial
    members: list[int] = field(default_factory=list)
    mask: int = 0  # bit per member
    shown: dict[str, Any] = field(default_factory=dict)

    def admit(self, members: Sequence[int]) -> None:
        """Stand in for more."""
        self.members.extend(members)
        self.mask |= sum(1 << index for index in members)

    def drop(self, index: int) -> None:
        """Stand in for one less."""
        self.members.remove(index)
        self.mask &= ~(1 << index)

    def refresh(self) -> bool:
        """Bring ``shown`` up to date; whether it holds other objects than before."""
        before, self.shown = self.shown, {}
        for key, value in self.trial.state.items():
            if isinstance(value, Tensor) and value.dim():
                empty = before.get(key)
                fits = isinstance(empty, Tensor) and empty.dtype is value.dtype
                self.shown[key] = empty if fits else value.new_empty(0)
            else:
                self.shown[key] = value
        return before.keys() != self.shown.keys() or any(before[key] is not self.shown[key] for key in before)


class StandIns:
    """All stand-ins of one optimizer on one rank; none for a class of which nothing is known. Nothing is collective."""

    def __init__(self, cls: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> None:
        self._class, self._defaults = cls, dict(defaults)
        self._known = is_known(cls)
        self._all: list[_StandIn] = []
        self._of: dict[int, _StandIn] = {}
        self._due: list[int] = []  # what is to be shown anew

    def add(self, members: Mapping[int, Kind], groups: Sequence[Mapping[str, Any]]) -> None:
        """Stand in for more parameters, given by global index."""
        for kind in set(members.values()) if self._known else ():
            self._put(self._new(kind, groups), [index for index, other in members.items() if other == kind])

    def _new(self, kind: Kind, groups: Sequence[Mapping[str, Any]]) -> _StandIn:
        like = torch.zeros((1,) * max(kind.dims, 1), dtype=kind.dtype, device=kind.device)
        return _StandIn(kind, Trial(self._class, like, hypers_of(groups[kind.group]), **self._defaults))

    def _put(self, stand_in: _StandIn, members: Sequence[int]) -> None:
        """Let ``members`` be stood in for by another."""
        for index in members:
            before = self._of.get(index)
            if before is not None:
                before.drop(index)
            self._of[index] = stand_in
        stand_in.admit(members)
        stand_in.refresh()
        self._due.extend(members)
        self._all = [found for found in (*self._all, stand_in) if found.members]

    def step(self, used: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Follow a step of the owners.

        Args:
            used: bit per global index, whether any rank had a gradient.
        """
        for stand_in in list(self._all):
            with_grad = used & stand_in.mask
            if not with_grad:
                continue
            if with_grad != stand_in.mask:
                part = [index for index in stand_in.members if with_grad >> index & 1]
                stand_in = self._copied(stand_in, part, groups)
            try:
                stand_in.trial.optimizer.param_groups[0].update(hypers_of(groups[stand_in.kind.group]))
                stand_in.trial.step()
            except Exception:  # what the class cannot step like this, it shows nothing of; an owner says what is wrong
                self._forget(stand_in)
                continue
            if stand_in.refresh():
                self._due.extend(stand_in.members)

    def _forget(self, stand_in: _StandIn) -> None:
        self._all.remove(stand_in)
        for index in stand_in.members:
            del self._of[index]

    def _copied(self, stand_in: _StandIn, members: Sequence[int], groups: Sequence[Mapping[str, Any]]) -> _StandIn:
        """Another one in the same state, for some of its members."""
        other = self._new(stand_in.kind, groups)
        copied = {key: apart(value) for key, value in stand_in.trial.state.items()}
        other.trial.optimizer.state[other.trial.param] = copied
        self._put(other, members)
        return other

    def news(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """(global index, what to show, if anything) of every parameter that has other objects than when last asked."""
        due, self._due = self._due, []
        for index in dict.fromkeys(due):
            yield index, self._of[index].shown if index in self._of else {}

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the scalars of full-shape state; a parameter without any is new."""
        alike: dict[tuple[Kind, str], list[int]] = {}
        for index, stand_in in self._of.items():
            scalars = {key: _number(value) for key, value in states.get(index, {}).items()}
            alike.setdefault((stand_in.kind, repr(sorted(scalars.items(), key=repr))), []).append(index)
        for (kind, _), members in alike.items():
            self._put(self._filled(kind, states.get(members[0], {}), groups), members)

    def _filled(self, kind: Kind, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> _StandIn:
        """A new one with the scalars of ``state``, as the class takes them from a state dict."""
        made = self._new(kind, groups)
        if state:
            model = self._new(kind, groups).trial
            model.step()
            like = model.state
            mine = {key: _fitted(value, like.get(key), model.param) for key, value in state.items()}
            made.trial.optimizer.load_state_dict(
                {"state": {0: mine}, "param_groups": model.optimizer.state_dict()["param_groups"]}
            )
        return made

    def adopt(
        self, entry_of: Callable[[int], Mapping[str, Any] | None], groups: Sequence[Mapping[str, Any]]
    ) -> dict[int, Mapping[str, Any] | None]:
        """Follow what the user made of what was shown.

        Args:
            entry_of: what the user has of a parameter, by global index; ``None`` if that is gone.

        Returns:
            What the user has of the parameters of which that is not what was shown; there are :meth:`news` of these.
        """
        edited: dict[int, Mapping[str, Any] | None] = {}
        for stand_in in self._all:
            shown = stand_in.shown
            for index in stand_in.members:
                entry = entry_of(index)
                if not (entry or shown):
                    continue
                if not (entry and shown and all(map(is_, map(entry.get, shown), shown.values()))):
                    edited[index] = entry
        for index, entry in edited.items():
            self._put(self._filled(self._of[index].kind, entry or {}, groups), [index])
        return edited


def _number(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.dim() == 0 else ()


def _fitted(value: Any, like: Any, param: Tensor) -> Any:
    """A loaded value in the shape that a stand-in has: of what is no scalar only its being there counts.

    Args:
        like: what the stand-in has there, if anything. param: its parameter.
    """
    if isinstance(like, Tensor) and like.dim():
        return torch.zeros_like(like)
    if like is None and isinstance(value, Tensor) and value.dim():
        return torch.zeros_like(param, dtype=value.dtype)
    return apart(value)
