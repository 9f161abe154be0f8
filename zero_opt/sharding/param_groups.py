"""The param groups as users hold them, compared with the parameters that were planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from operator import is_
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import ParamsReplaced
from ..flat_param import is_dtensor

_WAY_OUT = (
    "construct the optimizer after prepare(), fully_shard() and whatever else replaces parameters, and add parameters "
    "with opt.add_param_group(), on every rank"
)


@dataclass(frozen=True)
class Edit:
    """A difference between the param groups and what was planned.

    Attributes:
        text: what the groups hold and what was planned.
        fits: every group has as many parameters as before, of the same shapes, so that all can be planned again.
    """

    text: str
    fits: bool


_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Replanned(Protocol):
    def _replan(self) -> None:
        """Plan the current parameters of the param groups, or raise ParamsReplaced on every rank. Collective."""


_Self = TypeVar("_Self", bound=_Replanned)


def following(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Decorate a collective method of an optimizer: if it raises ParamsReplaced, plan again and call it once more.

    The method raises that on every rank, before it changes anything; see :meth:`PlannedGroups.require`.
    """

    @wraps(method)
    def follow(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with suppress(ParamsReplaced):
            return method(self, *args, **kwargs)
        self._replan()
        return method(self, *args, **kwargs)

    return follow


class Owner(Protocol):
    """What users see as the optimizer."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """See ``torch.optim.Optimizer``."""


class PlannedGroups:
    """The planned parameters of every param group of ``owner``. No method is collective."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._planned: list[list[Tensor]] = []

    def add(self) -> None:
        """Remember the parameters of the owner's groups that are new."""
        self._planned += [list(group["params"]) for group in self._owner.param_groups[len(self._planned) :]]

    def __iter__(self) -> Iterator[Tensor]:
        """All parameters, by global index."""
        return (param for planned in self._planned for param in planned)

    def edit(self) -> Edit | None:
        """Return how the groups differ from what was planned; ``None`` if they hold the planned parameters.

        Costs 14 ns per parameter: equality of lists would ask tensors whether they are equal.
        """
        groups = self._owner.param_groups
        if len(groups) != len(self._planned):
            return Edit(f"opt.param_groups has {len(groups)} groups, but {len(self._planned)} were planned", fits=False)
        edits = [
            _edit(f'"params" of param group {number}', group.get("params"), planned)
            for number, (group, planned) in enumerate(zip(groups, self._planned, strict=True))
        ]
        found = [edit for edit in edits if edit is not None]
        return min(found, key=lambda edit: edit.fits) if found else None

    def require(self) -> None:
        """Raise ParamsReplaced unless the groups hold the planned parameters."""
        edit = self.edit()
        if edit is not None:
            raise ParamsReplaced(f"{edit.text}; {_WAY_OUT}")

    def require_replaceable(self, *, begun: bool) -> None:
        """Raise ParamsReplaced if the optimizer cannot plan the groups' parameters instead of the planned ones.

        Args:
            begun: the planned parameters have been used: stepped, loaded, or reduced gradients of.
        """
        edit = self.edit()
        if edit is not None and (begun or not edit.fits):
            late = ", which has been stepped, or had gradients reduced or state loaded" if edit.fits else ""
            raise ParamsReplaced(f"{edit.text}{late}; {_WAY_OUT}")

    def require_replaced(self) -> None:
        """Raise ParamsReplaced if the groups hold the planned parameters, while another rank's do not."""
        if self.edit() is None:
            raise ParamsReplaced(
                f"opt.param_groups holds the planned parameters here, but others on another rank; {_WAY_OUT}"
            )


def _edit(label: str, params: Any, planned: Sequence[Tensor]) -> Edit | None:
    if not isinstance(params, (list, tuple)):
        return Edit(f"{label} is of type {torch.typename(params)}, not a list", fits=False)
    if len(params) != len(planned):
        return Edit(f"{label} has {len(params)} parameters, but {len(planned)} were planned", fits=False)
    if all(map(is_, params, planned)):
        return None
    pairs = zip(params, planned, strict=True)
    others = [(position, *pair, _fits(*pair)) for position, pair in enumerate(pairs) if pair[0] is not pair[1]]
    position, param, before, fits = min(others, key=lambda other: other[-1])
    held = f"another {_named(param)}" if isinstance(param, Tensor) else f"a {torch.typename(param)}"
    return Edit(f"position {position} of {label} holds {held} in place of the planned {_named(before)}", fits)


def _fits(param: object, before: Tensor) -> bool:
    """Return whether ``param`` can replace a planned parameter; only a DTensor can replace a DTensor."""
    alike = isinstance(param, Tensor) and param.shape == before.shape
    return alike and (is_dtensor(param) or not is_dtensor(before))


def _named(param: Tensor) -> str:
    kind = "DTensor" if is_dtensor(param) else "tensor"
    return f"{kind} of shape {tuple(param.shape)}"
