"""Objects that are remembered, to see in one go whether others have come in their place."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
from operator import is_
from typing import Any

from torch import Tensor

from .extension import native, native_available
from .placing import placing_of


def flattened(dicts: list[Any]) -> list[Any] | None:
    """Return all keys and values of dicts, each key before its value.

    ``None`` if one of them is an instance of another class.
    """
    if native_available():
        return native.flattened(dicts)
    if not all(map(is_, map(type, dicts), repeat(dict))):
        return None
    return [*chain.from_iterable(chain.from_iterable(map(dict.items, dicts)))]


class SameObjects:
    """A list of objects, compared by identity: what refers to the same objects still has not been edited.

    Takes a few ns per object.
    """

    def __init__(self) -> None:
        self._known: list[Any] | None = None

    def note(self, objects: Iterable[Any]) -> None:
        """Remember these objects, in order."""
        self._known = [*objects]

    def are(self, objects: Iterable[Any]) -> bool:
        """Return whether these are the objects that were noted last, in the same order; not if none were."""
        now, known = [*objects], self._known
        if known is None or len(now) != len(known):
            return False
        return native.same_objects(now, known) if native_available() else all(map(is_, now, known))

    def forget(self) -> None:
        """Let go of the objects: :meth:`are` is false until others are noted."""
        self._known = None


def memory_of(objects: Iterable[Any]) -> tuple[object, object]:
    """Return :func:`placing_of` those that are tensors; takes 0.1 us each."""
    return placing_of([value for value in objects if isinstance(value, Tensor)])


class SameMemory:
    """Tensors, and where and how they lay when they were noted.

    ``t.data = other``, ``t.set_(other)`` and ``torch.utils.swap_tensors(t, other)`` leave the same object elsewhere;
    ``t.resize_()``, ``t.t_()`` and others leave it there with another shape.
    """

    def __init__(self) -> None:
        self.forget()

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Remember where these tensors lie."""
        self._tensors = [*tensors]
        self._known = placing_of(self._tensors)

    def forget(self) -> None:
        """Let go of the tensors."""
        self.note(())

    def holds(self) -> bool:
        """Return whether all that were noted last lie where they lay, and as they did."""
        return placing_of(self._tensors) == self._known
