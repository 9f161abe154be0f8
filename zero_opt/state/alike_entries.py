"""Entries of ``state`` for parameters that were used alike: what one step makes of one of them shows in all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from ..system.inference_mode import outside_inference_mode, version_of
from ..system.same_objects import SameObjects


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


class AlikeEntries:
    """Entries with the same scalars and no elements. The user sees one per parameter, and may write to it alone.

    Scalars that are tensors are elements of one tensor per key, so one call writes them for all parameters.

    Attributes:
        members: global indices of the parameters.
        entry: what their owners have, in objects that users do not see. Empty where there are no entries.
    """

    def __init__(
        self,
        state: MutableMapping[Tensor, Any],
        params: Sequence[Tensor],
        members: Sequence[int],
        entry: Mapping[str, Any],
    ) -> None:
        self._state, self._params = state, params
        self.members, self.entry = members, dict(entry)
        with outside_inference_mode():  # users may write to them later
            self._columns = {
                key: value.detach().expand(len(members)).clone() for key, value in entry.items() if _is_scalar(value)
            }
            elements = {key: column.unbind() for key, column in self._columns.items()}
        for at, index in enumerate(members if entry else ()):
            own = {key: column[at] for key, column in elements.items()}
            state[params[index]] = {**entry, **own}
        self._objects = SameObjects()
        self._note()

    def _note(self) -> None:
        self._objects.note(self._held())
        self._versions = [*map(version_of, self._columns.values())]

    def _held(self) -> Iterator[Any]:
        for entry in self._shown():
            yield entry
            if entry:
                yield from entry
                yield from entry.values()

    def _shown(self) -> Iterator[Any]:
        return (self._state.get(self._params[index]) or None for index in self.members)

    def are_edited(self, *, objects: bool) -> bool:
        """Return whether the user has written to an entry in place or, if ``objects`` are looked at, otherwise."""
        written = self._versions != [*map(version_of, self._columns.values())]
        return written or (objects and not self._objects.are(self._held()))

    def leave_to(self, others: Sequence[int]) -> None:
        """Let these entries be those of ``others`` among the members alone."""
        self.members = others
        self._note()

    def follow(self, after: Mapping[str, Any]) -> bool:
        """Let all entries be what a step has made of :attr:`entry`; returns False if that has other keys or kinds."""
        dtypes = {key: value.dtype for key, value in after.items() if _is_scalar(value)}
        if after.keys() != self.entry.keys() or dtypes != {key: kept.dtype for key, kept in self._columns.items()}:
            return False
        for key, column in self._columns.items():
            column.fill_(after[key])
        others = {key: value for key, value in after.items() if value is not self.entry[key] and key not in dtypes}
        for entry in self._shown() if others else ():
            entry.update(others)
        self.entry = dict(after)
        self._versions = [*map(version_of, self._columns.values())]
        if others:
            self._note()
        return True
