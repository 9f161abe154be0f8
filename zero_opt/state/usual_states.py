"""Loaded states of many parameters, checked in one go where all are of the usual kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, repeat
from operator import add, attrgetter, is_, le, methodcaller, mul
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from ..kernels.adam_state import MAXIMUM
from ..kernels.checks import DTYPE_NAMES, may_be_count
from ..kernels.strides import dimensions_of, joined_scalars
from ..placement.native_rules import COLUMN_KEYS
from ..system.same_objects import flattened

# Keys with rules of their own.
_ODD_KEYS = {*COLUMN_KEYS, MAXIMUM, "master"}
_COUNT_DTYPES = (torch.float32, torch.float64)
_bytes_each, _bytes_all = attrgetter("itemsize"), attrgetter("nbytes")


def are_usual(states: Sequence[Any], params: Sequence[Tensor]) -> bool:
    """Return whether the states of these parameters are alike but for shapes, and each can be loaded.

    Each is a dict with the same names, plain tensors of their parameter's shape or without dimensions, and in ``step``
    a number of steps.
    """
    columns = columns_of_alike(states)
    if columns is None or not _ODD_KEYS.isdisjoint(columns):
        return False
    likes = [*params]
    values = [*chain.from_iterable(columns.values())]
    return (
        all(_is_usual(name, column, likes) for name, column in columns.items())
        and _are_there(values)
        and _are_counts(columns.get("step", []))
    )


def columns_of_alike(states: Sequence[Any]) -> dict[str, list[Tensor]] | None:
    """Return the values of each name of states that are dicts of plain tensors, under the same names in one order.

    ``None`` of other states, of names that are no texts, and of no states.
    """
    held = flattened([*states]) if states else None
    if held is None:
        return None
    names = [*states[0]]
    keys, values = held[::2], held[1::2]
    # A dict has a name once: as many keys as names in each.
    if not all(map(is_, map(type, keys), repeat(str))) or keys != names * len(states):
        return None
    plain = all(map(is_, map(type, values), repeat(Tensor)))
    return {name: values[at :: len(names)] for at, name in enumerate(names)} if plain else None


def values_by_name(states: Collection[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each name, of states with the same names in the same order."""
    names = next(iter(states), ())
    values = [*chain.from_iterable(map(methodcaller("values"), states))]
    return {name: values[at :: len(names)] for at, name in enumerate(names)}


def _are_there(values: list[Tensor]) -> bool:
    """Return whether all elements of contiguous tensors lie in memory of their own, and are as they lie there."""
    ends = map(add, map(mul, map(Tensor.storage_offset, values), map(_bytes_each, values)), map(_bytes_all, values))
    sizes = map(UntypedStorage.nbytes, map(Tensor.untyped_storage, values))
    return all(map(le, ends, sizes)) and not any(map(Tensor.is_neg, values))


def _is_usual(name: str, column: list[Tensor], likes: list[Tensor]) -> bool:
    """Return whether the values under one name have one dtype, and the shapes of the parameters or no dimensions."""
    have_dimensions = dimensions_of(column, likes)
    if have_dimensions is None or column[0].dtype not in DTYPE_NAMES:
        return False
    return name != "step" or not (have_dimensions or column[0].dtype not in _COUNT_DTYPES)


def _are_counts(steps: list[Tensor]) -> bool:
    """Return whether values without dimensions are numbers of steps."""
    if not steps:
        return True
    counts = joined_scalars(steps)
    return may_be_count(counts.min()) and may_be_count(counts.max()) and not bool(counts.isnan().any())


class UsualStates(dict[int, Mapping[str, Any]]):
    """States by global parameter index that :func:`are_usual`: what holds for one holds for all of its shape."""
