"""Loaded states of many parameters, checked in one go where all are of the usual kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor

from ..kernels.checks import DTYPE_NAMES, is_count
from ..kernels.strides import dtype_of, shape_of
from ..placement.adam_rules import COLUMN_KEYS, MAXIMUM

# Keys with rules of their own.
_ODD_KEYS = {*COLUMN_KEYS, MAXIMUM, "master"}
_COUNT_DTYPES = (torch.float32, torch.float64)
_is_cpu, _layout, _is_nested = attrgetter("is_cpu"), attrgetter("layout"), attrgetter("is_nested")


def are_usual(states: Sequence[Any], params: Sequence[Tensor]) -> bool:
    """Return whether the states of these parameters are alike but for shapes, and each can be loaded.

    Each is a dict with the same names, plain tensors of their parameter's shape or without dimensions, and in ``step``
    a number of steps.
    """
    if not states or not all(map(is_, map(type, states), repeat(dict))):
        return False
    names = tuple(states[0])
    if not all(type(name) is str for name in names) or not _ODD_KEYS.isdisjoint(names):
        return False
    if not all(map(eq, map(tuple, states), repeat(names))):
        return False
    values = [*chain.from_iterable(map(dict.values, states))]
    if not _are_plain(values):
        return False
    shapes = list(map(shape_of, params))
    columns = {name: values[at :: len(names)] for at, name in enumerate(names)}
    return all(_is_usual(name, column, shapes) for name, column in columns.items())


def _are_plain(values: Sequence[Any]) -> bool:
    """Return whether all are dense tensors in host memory, of which every element is there and none a lazy view."""
    return (
        all(map(is_, map(type, values), repeat(Tensor)))
        and set(map(_layout, values)) <= {torch.strided}
        and set(map(_is_cpu, values)) <= {True}
        and not any(map(_is_nested, values))
        and DTYPE_NAMES.keys() >= set(map(dtype_of, values))
        and all(map(Tensor.is_contiguous, values))
        and not any(map(Tensor.is_neg, values))
        and all(map(_is_there, values))
    )


def _is_there(value: Tensor) -> bool:
    """Return whether all elements of a contiguous tensor lie in memory of its own."""
    end = value.storage_offset() * value.itemsize + value.nbytes
    return bool(value.data_ptr()) and end <= value.untyped_storage().nbytes()


def _is_usual(name: str, column: Sequence[Tensor], shapes: Sequence[torch.Size]) -> bool:
    """Return whether the values under one name have one dtype, and the shapes of the parameters or no dimensions."""
    found = list(map(shape_of, column))
    if len(set(map(dtype_of, column))) > 1 or not (found == shapes or not any(found)):
        return False
    if name != "step":
        return True
    if any(found) or column[0].dtype not in _COUNT_DTYPES:
        return False
    counts = torch.stack(list(column))
    return is_count(counts.min()) and is_count(counts.max()) and not bool(counts.isnan().any())


class UsualStates(dict[int, Mapping[str, Any]]):
    """States by global parameter index that :func:`are_usual`: what holds for one holds for all of its shape."""
