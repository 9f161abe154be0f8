"""Hyperparameters of param groups that are remembered, so that what was made of them holds while none was edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from .same_objects import SameObjects, flattened

# Keys of the user's groups alone: the wrapped optimizer has its own params, and no names for them.
OUTER_KEYS = ("params", "param_names")
# Hyperparameters of these types change only by another object in their place.
_FIXED = (float, int, bool, str, type(None))


class UneditedHypers:
    """Param groups that are remembered, to see in one go whether any hyperparameter was edited."""

    def __init__(self) -> None:
        self._known = SameObjects()

    def are(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether these are the groups that were noted last, unedited."""
        return self._known.are(_objects_in(groups))

    def note(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Remember the groups as they are, unless a hyperparameter may be written to in place."""
        values = (value for group in groups for key, value in group.items() if key not in OUTER_KEYS)
        if all(map(_is_fixed, values)):
            self._known.note(_objects_in(groups))
        else:
            self._known.forget()


def _objects_in(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    within = flattened([*groups])
    if within is None:  # a group is of a class of its own
        within = [*chain.from_iterable((*group, *group.values()) for group in groups)]
    return [*groups, *within]


def _is_fixed(value: Any) -> bool:
    return type(value) in _FIXED or (type(value) is tuple and all(map(_is_fixed, value)))
