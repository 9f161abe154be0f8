"""The state of a parameter that is stepped by columns, as users and state dicts have it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import quoted
from ..native_rules import COLUMN_SELECTED, COLUMN_STEPS, WAITING, WINDOW
from ..read_through import MadeState
from .column_slice import ColumnSlice
from .schedule import Schedule

_WINDOW_NUMBERS = 5  # the position of the schedule, and how many gradients wait


def column_shape(shape: torch.Size) -> torch.Size:
    """The shape of what there is one of per column: every dimension but the last is 1."""
    return torch.Size([1] * (len(shape) - 1) + [shape[-1]])


def column_places(param: Tensor) -> dict[str, tuple[Tensor, torch.Size]]:
    """The column keys of a parameter: a value each, and the shape that it grows to."""
    per_column = column_shape(param.shape)
    return {
        COLUMN_STEPS: (torch.zeros(1, dtype=torch.float32, device="cpu"), per_column),
        COLUMN_SELECTED: (torch.zeros(1, dtype=torch.bool, device="cpu"), per_column),
        WAITING: (torch.zeros(1, dtype=torch.float32, device="cpu"), param.shape),
        WINDOW: (torch.zeros(1, dtype=torch.float64, device="cpu"), torch.Size([_WINDOW_NUMBERS])),
    }


def check_columns(state: Mapping[str, Any], shape: torch.Size) -> str | None:
    """What is wrong with the state of a parameter of this shape that was stepped by columns; None if it fits."""
    per_column = column_shape(shape) if shape else shape
    expected = {COLUMN_STEPS: per_column, COLUMN_SELECTED: per_column}
    if WAITING in state:
        expected[WAITING] = shape
    for key, wanted in expected.items():
        value: Any = state.get(key)
        if not isinstance(value, Tensor) or value.shape != wanted or not _is_compared(value):
            given = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else quoted(value)
            return f"state {key!r} must be a bool or floating-point tensor of shape {tuple(wanted)}, got {given}"
    return _wrong_window(state.get(WINDOW))


def _is_compared(value: Tensor) -> bool:
    """Whether torch compares a tensor's elements. Loads of plain optimizers make floating-point numbers of bools."""
    return value.dtype is torch.bool or (value.is_floating_point() and value.itemsize > 1)


def _wrong_window(window: Any) -> str | None:
    if not isinstance(window, Tensor) or window.is_meta or window.is_complex() or window.shape != (_WINDOW_NUMBERS,):
        return f"state {WINDOW!r} beside {COLUMN_STEPS!r} must be a tensor of {_WINDOW_NUMBERS} numbers, got {window!r}"
    if type(window) is not Tensor:  # a DTensor, of which this rank may have no part
        return None
    numbers = window.tolist()
    least = (0, 0, -1, 0, 0)  # steps, of them in the window, since selection (none), the window's, gradients that wait
    if all(low <= number < math.inf and number == int(number) for low, number in zip(least, numbers, strict=True)):
        return None
    return f"state {WINDOW!r} is {numbers}, no position between selections"


class SavedColumns(MadeState):
    """A slice's state in the form of ``torch.optim``; every value is made when it is asked for.

    ``step`` is the largest count of any column. There are the ``COLUMN_KEYS`` besides;
    ``waiting`` only while gradients wait; ``window`` is the position of the schedule and the number of gradients in
    ``waiting``, fp64.
    """

    def __init__(self, column_slice: ColumnSlice, schedule: Schedule) -> None:
        self._slice, self._schedule = column_slice, schedule

    def __iter__(self) -> Iterator[str]:
        waiting = [WAITING] if self._slice.gathered else []
        yield from (*self._slice.home, COLUMN_STEPS, COLUMN_SELECTED, *waiting, WINDOW)

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values() if isinstance(value, Tensor))

    def __getitem__(self, key: str) -> Any:
        column_slice, per_column = self._slice, column_shape(self._slice.flat.shape)
        if key == "step":
            return column_slice.counts.max()
        if key == COLUMN_STEPS:
            return column_slice.counts.view(per_column)
        if key == COLUMN_SELECTED:
            selected = torch.zeros(per_column, dtype=torch.bool, device="cpu")
            selected.view(-1)[column_slice.columns.chosen] = True
            return selected
        if key == WINDOW:
            return torch.tensor([*self._schedule.position(), column_slice.gathered], dtype=torch.float64, device="cpu")
        if key == WAITING and column_slice.gathered:
            return column_slice.shaped(column_slice.waiting.clone(), 0)
        if key not in column_slice.home:
            raise KeyError(key)
        return column_slice.value(key)
