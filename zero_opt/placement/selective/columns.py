"""Columns of a parameter: where they lie in a slice of it, sums of their squares, and what state has of each.

Columns are slices along the last dimension. In storage order they recur: a few neighboring elements of one column,
then of the next, and a row is complete once each has had its turn. A slice of a parameter begins and ends anywhere.

State has, besides the keys of ``torch.optim``, ``column_steps`` and ``column_selected`` with an element per column;
``waiting``, of the parameter's shape, only while gradients wait; ``window``, the position of the schedule and the
number of gradients in ``waiting``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import quoted
from ...layout import ParamSlice
from ...sharding.flat_param import FlatParam
from ..native_rules import COLUMN_SELECTED, COLUMN_STEPS, WAITING, WINDOW

# Elements widened to fp64 at a time.
_SQUARED_NUMEL = 1 << 18
# Loads of plain optimizers make floating-point numbers of bools; of narrower ones, torch compares no elements.
_DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Steps, those in the window, those since selection (-1: never), those of a window; gradients that wait.
_LEAST = (0, 0, -1, 0, 0)


def is_matrix(shape: torch.Size) -> bool:
    """Whether a parameter of this shape has columns that are tensors."""
    return len(shape) >= 2 and shape.numel() > 0


def columns_of(shape: torch.Size) -> int:
    """How many columns a parameter of this shape has; what is no matrix is one."""
    return shape[-1] if is_matrix(shape) else 1


def _row(flat: FlatParam) -> tuple[int, int]:
    """How many columns a row has, and how many elements of one follow each other in it."""
    total = columns_of(flat.shape)
    return total, flat.strides[-1] if total > 1 else max(flat.numel, 1)


def places_of(mask: Tensor, piece: ParamSlice, flat: FlatParam) -> Tensor:
    """Where in a slice the elements of the columns in a mask lie, ascending, on the parameter's device."""
    (start, stop), (total, inner) = piece.in_param, _row(flat)
    width = total * inner
    rows = torch.arange(start // width, -(-stop // width), dtype=torch.int64, device="cpu") * width
    places = (rows[:, None] + mask.repeat_interleave(inner).nonzero().view(-1)).view(-1) - start
    return places[(places >= 0) & (places < stop - start)].to(flat.param.device)


def square_sums(run: Tensor, piece: ParamSlice, flat: FlatParam) -> Tensor:
    """Per column of a parameter, the sum of squares of its elements in a slice, fp64, in host memory."""
    total, inner = _row(flat)
    sums = torch.zeros(total, dtype=torch.float64, device=run.device)
    rows = max(_SQUARED_NUMEL // (total * inner), 1)
    lead = piece.in_param.start % inner  # every part begins where the slice does, in the same column
    first = piece.in_param.start // inner % total
    for part in torch.split(run, rows * total * inner):
        squares = part.double().square()
        if inner > 1:
            squares = pad(squares, (lead, -(lead + part.numel()) % inner)).view(-1, inner).sum(1)
        sums += pad(squares, (first, -(first + squares.numel()) % total)).view(-1, total).sum(0)
    return sums.cpu()


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
    """What is wrong with the column keys of a state of a parameter of this shape; None if they fit, or are not there.

    Args:
        part: of a live state, the shape of the part of the parameter that it is of. There, all that waits counts.
    """
    if not isinstance(state.get(COLUMN_STEPS), Tensor):
        return None
    for key, (_, grown) in column_places(shape).items():
        value: Any = state.get(key)
        wanted = grown if key != WAITING or part is None else part
        fits = isinstance(value, Tensor) and not value.is_meta and value.shape == wanted and value.dtype in _DTYPES
        if (key in state or key != WAITING) and not fits:
            given = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else quoted(value)
            return f"state {key!r} must be a bool or floating-point tensor of shape {tuple(wanted)}, got {given}"
    if any(type(state[key]) is not Tensor for key in (WINDOW, COLUMN_STEPS, COLUMN_SELECTED)):
        return None  # a DTensor, whose values only a collective tells
    numbers = state[WINDOW].tolist()
    if not all(low <= number < math.inf and number == int(number) for low, number in zip(_LEAST, numbers, strict=True)):
        return f"state {WINDOW!r} is {numbers}, no position between selections"
    # Selected columns have been stepped by all gradients that wait for the others.
    most = float(state[COLUMN_STEPS].max()) if bool(state[COLUMN_SELECTED].any()) else math.inf
    if numbers[-1] and (WAITING not in state or numbers[-1] > most):
        return f"state {WINDOW!r} says that {numbers[-1]:g} gradients wait, which {WAITING!r} or the steps do not have"
    if part is not None and WAITING in state and trusted_window(state) is None:
        return (
            "while gradients wait, state 'step' must be the largest of 'column_steps': write to both, or to 'step' "
            "once the window has ended, or delete the entry from opt.state to start afresh now"
        )
    return None


def trusted_window(saved: Mapping[str, Any]) -> list[float] | None:
    """``window``, if the column keys belong to the state: an optimizer that ignores them may have stepped it since."""
    counts = saved.get(COLUMN_STEPS)
    step = float(torch.as_tensor(saved.get("step", -1.0), dtype=torch.float32, device="cpu"))  # as counts are kept
    if not isinstance(counts, Tensor) or not counts.numel() or float(counts.max()) != step:
        return None
    return [float(number) for number in saved[WINDOW].reshape(-1).tolist()]
