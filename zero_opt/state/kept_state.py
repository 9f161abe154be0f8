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
    """Return an entry's objects; an edit replaces at least one of them."""
    if isinstance(entry, ReadThrough):
        return [entry.adopted, *entry.held()]
    return list(chain.from_iterable(entry.items()))


class KeptState:
    """Full state of all ranks, with this rank's live state as it was seen then: the entries, their keys and values.

    These are held by reference, so that no other object gets the identity of one, and tensors with their versions. A
    caller forgets them where a step or a load may let go of them.
    """

    def __init__(self) -> None:
        # Full state, and what was seen of the live state: one attribute, since other threads may ask.
        self._kept: tuple[StatesByIndex, SameObjects, list[int]] | None = None

    def keep(self, full: StatesByIndex, live: Iterable[ParamState]) -> None:
        """Keep full state; ``live`` is what the user may edit of it on this rank."""
        objects, versions = self._look(live)
        seen = SameObjects()
        seen.note(objects)
        self._kept = full, seen, versions

    def current(self, live: Iterable[ParamState]) -> StatesByIndex | None:
        """Return the full state if it is there and the live state has not been edited since.

        Edits of :class:`ReadThrough` are seen once they are adopted.
        """
        if (kept := self._kept) is None:
            return None
        full, seen, known = kept
        objects, versions = self._look(live)
        return full if versions == known and seen.are(objects) else None

    def forget(self) -> None:
        """Let go of everything."""
        self._kept = None

    @staticmethod
    def _look(live: Iterable[ParamState]) -> tuple[list[Any], list[int]]:
        """Return what an edit replaces by other objects, and the versions of the tensors of these."""
        entries = [*live]
        contents = flattened(entries)
        if contents is None:
            contents = [*chain.from_iterable(map(_seen_in, entries))]
        return [*entries, *contents], versions_of([value for value in contents if isinstance(value, Tensor)])
