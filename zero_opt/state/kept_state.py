"""Full state that was brought to this rank, and whether it is still that of the live state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor

from ..placement import ParamState, ReadThrough
from ..system.inference_mode import versions_of
from ..system.same_objects import SameObjects, flattened
from .state_dict import StatesByIndex


def _seen_in(entry: ParamState) -> list[Any]:
    """Return all objects of an entry of which one is another after an edit."""
    if isinstance(entry, ReadThrough):
        return [entry.adopted, *entry.held()]
    return [*chain.from_iterable(entry.items())]


class KeptState:
    """Full state of all ranks, with this rank's live state as it was seen then: the entries, their keys and values.

    These are held by reference, so that no other object gets the identity of one, and tensors with their versions. A
    caller forgets them where a step or a load may let go of them.
    """

    def __init__(self) -> None:
        self._full: StatesByIndex | None = None
        self._seen, self._versions = SameObjects(), list[int]()

    def keep(self, full: StatesByIndex, live: Iterable[ParamState]) -> None:
        """Keep full state; ``live`` is what the user may edit of it on this rank."""
        self.forget()
        objects, self._versions = self._look(live)
        self._seen.note(objects)
        self._full = full  # last, since other threads may ask for it

    def current(self, live: Iterable[ParamState]) -> StatesByIndex | None:
        """Return the full state if it is there and the live state has not been edited since.

        Edits of :class:`ReadThrough` are seen once they are adopted.
        """
        full = self._full
        if full is None:
            return None
        objects, versions = self._look(live)
        return full if versions == self._versions and self._seen.are(objects) else None

    def forget(self) -> None:
        """Let go of everything."""
        self._full = None
        self._seen.forget()
        self._versions = []

    @staticmethod
    def _look(live: Iterable[ParamState]) -> tuple[list[Any], list[int]]:
        """Return what an edit replaces by other objects, and the versions of the tensors of these."""
        entries = [*live]
        contents = flattened(entries)
        if contents is None:
            contents = [*chain.from_iterable(map(_seen_in, entries))]
        return [*entries, *contents], versions_of([value for value in contents if isinstance(value, Tensor)])
