"""Entries of ``state`` for parameters that were used alike, which are stepped together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor

from ..system.devices import is_host
from ..system.inference_mode import outside_inference_mode
from ..system.same_objects import SameMemory, SameObjects


class StateOwner(Protocol):
    """What has the user's param groups and state: the optimizer, or a view of it."""

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]:
        """The user's param groups, as in ``torch.optim.Optimizer``."""

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """The user's state by parameter, as in ``torch.optim.Optimizer``."""


def _scalars(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in entry.items() if isinstance(value, Tensor) and value.dim() == 0}


class AlikeEntries:
    """Entries with the same scalars and no elements. The user sees one per parameter, and may write to it alone.

    Attributes:
        members: global indices of the parameters.
        entry: what one owner has. Users see its other values, and copies of its scalars. Empty where there are no
            entries.
    """

    def __init__(
        self,
        owner: StateOwner,
        params: Sequence[Tensor],
        members: Sequence[int],
        entry: Mapping[str, Any],
    ) -> None:
        """Give all members entries of their own, whose scalars are elements of one tensor per key."""
        self.members, self.entry = members, dict(entry)
        with outside_inference_mode():  # users may write to them later
            self._columns = {key: value.detach().expand(len(members)).clone() for key, value in _scalars(entry).items()}
            elements = {key: column.unbind() for key, column in self._columns.items()}
        self._at: Tensor | None = None  # where the members' are in the columns; None: they are all there is
        each = zip(*elements.values()) if elements else repeat((), len(members) if entry else 0)
        self._shown: list[dict[str, Any]] = [{**entry, **dict(zip(elements, scalars))} for scalars in each]
        for index, shown in zip(members, self._shown):
            owner.state[params[index]] = shown
        self._owner, self._params = owner, params
        self._objects, self._memory = SameObjects(), SameMemory()
        self._note(chain.from_iterable(elements.values()))

    @classmethod
    def around(cls, owner: StateOwner, params: Sequence[Tensor], index: int, entry: Mapping[str, Any]) -> AlikeEntries:
        """Take the entry that the user has made of one parameter's, as it is; ``entry``: a copy of it."""
        made = cls(owner, params, [index], {})
        made.entry, made._shown = dict(entry), [owner.state[params[index]]]
        scalars = _scalars(made._shown[0])
        made._columns = {key: value.view(1) for key, value in scalars.items()}
        made._note(scalars.values())
        return made

    def _note(self, scalars: Iterable[Tensor]) -> None:
        self._values = [[*entry.values()] for entry in self._shown]
        self._objects.note(self._held(self._shown))
        self._memory.note(scalars)
        self._versions = {key: column._version for key, column in self._columns.items()}

    def _shown_scalars(self) -> Iterable[Tensor]:
        return (value for entry in self._shown for value in _scalars(entry).values())

    def _held(self, entries: Iterable[Any]) -> list[Any]:
        held: list[Any] = []
        for entry in entries:
            held.append(entry)
            held += [] if entry is None else [*entry, *entry.values()]
        return held

    def _now(self) -> list[Any]:
        state = self._owner.state  # the user may assign another one
        return [state.get(self._params[index]) or None for index in self.members]

    def are_edited(self, *, objects: bool) -> bool:
        """Return whether the user has written to an entry in place or, if ``objects`` are looked at, otherwise."""
        if objects and not (self._objects.are(self._held(self._now())) if self._shown else not any(self._now())):
            return True
        return not (self._memory.holds() and all(map(self._shows, self._columns)))

    def _shows(self, key: str) -> bool:
        column = self._columns[key]
        if not is_host(column.device):  # a value would be waited for
            return column._version == self._versions[key]
        own = column if self._at is None else column[self._at]
        return torch.equal(own, self.entry[key].expand_as(own))

    def edited_members(self) -> list[int]:
        """Return the members whose entries the user has changed."""
        shown = zip(self._shown, self._values, strict=True) if self._shown else ((None, []) for _ in self.members)
        return [
            index
            for index, entry, (known, values) in zip(self.members, self._now(), shown, strict=True)
            if entry is not known or not (entry is None or self._is_as_known(entry, values))
        ]

    def _is_as_known(self, entry: Mapping[str, Any], values: Sequence[Any]) -> bool:
        now = [*entry.values()]
        if [*entry] != [*self.entry] or len(now) != len(values) or not all(map(is_, now, values)):
            return False
        return _scalars(entry).keys() == self._columns.keys() and all(
            key in self._columns
            and value.untyped_storage().data_ptr() == self._columns[key].untyped_storage().data_ptr()
            and (value.is_meta or torch.equal(value, self.entry[key]))
            for key, value in _scalars(entry).items()
        )

    def keep_only(self, members: Sequence[int]) -> None:
        """Let these entries be those of some of the members alone."""
        kept = [at for at, index in enumerate(self.members) if index in set(members)]
        at = torch.tensor(kept, dtype=torch.int64, device="cpu")
        for column in self._columns.values():
            at = at.to(column.device)
        self._at = at if self._at is None else self._at[at]
        self.members, self._shown = members, [self._shown[at] for at in kept] if self._shown else []
        self._note(self._shown_scalars())

    def follow(self, after: Mapping[str, Any]) -> bool:
        """Let all entries be what a step has made of :attr:`entry`; returns False if that has other keys or dtypes."""
        scalars = _scalars(after)
        dtypes = {key: value.dtype for key, value in scalars.items()}
        if after.keys() != self.entry.keys() or dtypes != {key: kept.dtype for key, kept in self._columns.items()}:
            return False
        for key, column in self._columns.items():
            column.fill_(scalars[key]) if self._at is None else column.index_fill_(0, self._at, scalars[key])
        others = {key: value for key, value in after.items() if value is not self.entry[key] and key not in dtypes}
        for entry in self._shown if others else ():
            entry.update(others)
        self.entry = dict(after)
        self._versions = {key: column._version for key, column in self._columns.items()}
        if others:
            self._note(self._shown_scalars())
        return True
