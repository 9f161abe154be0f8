"""Keys of a store, many at a time: its server answers one call after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def missing(check: Callable[[list[str]], bool], keys: Sequence[str]) -> list[str]:
    """Return those of the keys that a store does not have, in order: by one call if none is missing, else by several.

    Args:
        check: returns whether the store has all of some keys; called once per question.
    """
    keys = list(keys)
    if not keys or check(keys):
        return []
    half = len(keys) // 2
    return missing(check, keys[:half]) + missing(check, keys[half:]) if half else keys


def values(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys that a store has."""
    return list(store.multi_get(list(keys))) if store.has_extended_api() else [store.get(key) for key in keys]
