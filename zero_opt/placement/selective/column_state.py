"""Keys in the state of a parameter that is stepped by columns, besides those of ``torch.optim``: shapes, and checks.

There are ``column_steps`` and ``column_selected`` with an element per column; ``waiting``, of the parameter's shape,
only while gradients wait; ``window``, the position of the schedule and the number of gradients in ``waiting``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import quoted
from ..native_rules import COLUMN_SELECTED, COLUMN_STEPS, WAITING, WINDOW

# Steps, those in the window, those since selection (-1: never), those of a window; gradients that wait.
_LEAST = (0, 0, -1, 0, 0)


def column_shape(shape: torch.Size) -> torch.Size:
    """The shape of what there is one of per column: every dimension but the last is 1."""
    return torch.Size([1] * (len(shape) - 1) + [*shape[-1:]])


def column_places(shape: torch.Size) -> dict[str, tuple[Tensor, torch.Size]]:
    """The column keys of a parameter: a value each, and the shape that it grows to."""
    places = {
        COLUMN_STEPS: (torch.float32, column_shape(shape)),
        COLUMN_SELECTED: (torch.bool, column_shape(shape)),
        WAITING: (torch.float32, shape),
        WINDOW: (torch.float64, torch.Size([len(_LEAST)])),
    }
    return {key: (torch.zeros(1, dtype=dtype, device="cpu"), grown) for key, (dtype, grown) in places.items()}


def check_columns(state: Mapping[str, Any], shape: torch.Size, part: torch.Size | None = None) -> str | None:
    """What is wrong with the state of a parameter of this shape that was stepped by columns; None if it fits.

    Args:
        part: the shape of the part of the parameter that the state is of, if not of all.
    """
    for key, (_, grown) in column_places(shape).items():
        value: Any = state.get(key)
        wanted = grown if key != WAITING or part is None else part
        if (key in state or key != WAITING) and not _can_be(value, wanted):
            given = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else quoted(value)
            return f"state {key!r} must be a bool or floating-point tensor of shape {tuple(wanted)}, got {given}"
    if type(state[WINDOW]) is not Tensor:  # a DTensor, of which this rank may have no part
        return None
    numbers = state[WINDOW].tolist()
    if not all(low <= number < math.inf and number == int(number) for low, number in zip(_LEAST, numbers, strict=True)):
        return f"state {WINDOW!r} is {numbers}, no position between selections"
    # Selected columns have been stepped by all gradients that wait for the others.
    most = float(state[COLUMN_STEPS].max()) if bool(state[COLUMN_SELECTED].any()) else math.inf
    if numbers[-1] and (WAITING not in state or numbers[-1] > most):
        return (
            f"state {WINDOW!r} says that {numbers[-1]:g} gradients wait, which {WAITING!r} or the steps do not have; "
            "set a smaller step once the window has ended, or delete the entry from opt.state to start afresh now"
        )
    return None


def _can_be(value: Any, shape: torch.Size) -> bool:
    """Whether it is of this shape, and torch compares its elements.

    Loads of plain optimizers make floating-point numbers of bools.
    """
    if not isinstance(value, Tensor) or value.is_meta or value.shape != shape:
        return False
    return value.dtype is torch.bool or (value.is_floating_point() and value.itemsize > 1)
