"""Columns of a parameter: where they lie in a slice of it, when and which are selected, and what state has of each.

Columns are slices along the last dimension. In storage order they recur: a few neighboring elements of one column,
then of the next, and a row is complete once each has had its turn. A slice of a parameter begins and ends anywhere.

State has, besides the keys of ``torch.optim``, ``column_steps`` and ``column_selected`` with an element per column;
``waiting``, of the parameter's shape, only while gradients wait; ``window``, the position of the schedule and the
number of gradients in ``waiting``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...comm.groups import Group
from ...errors import quoted
from ...layout import ParamSlice
from ...policies import Selective
from ...sharding.flat_param import FlatParam
from ..native_rules import COLUMN_SELECTED, COLUMN_STEPS, WAITING, WINDOW

# Elements widened to fp64 at a time.
_SQUARED_NUMEL = 1 << 18
# Loads of plain optimizers make floating-point numbers of bools; of narrower ones, torch compares no elements.
_DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The steps since a selection, before any.
NEVER = -1
# Steps, those in the window, those since selection, those of a window; gradients that wait.
_LEAST = (0, 0, NEVER, 0, 0)
# Of ``update_interval="auto"``.
_FIRST_INTERVAL, _LONGEST_INTERVAL = 4, 16
_MUCH_LEFT, _LITTLE_LEFT = 0.75, 0.5


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
    first = start % (total * inner)
    rows = mask.repeat_interleave(inner).repeat(-(-(first + stop - start) // (total * inner)))
    return rows[first : first + stop - start].nonzero().view(-1).to(flat.param.device)


def square_sums(run: Tensor, piece: ParamSlice, flat: FlatParam) -> Tensor:
    """Per column of a parameter, the sum of squares of its elements in a slice, fp64, in host memory."""
    total, inner = _row(flat)
    sums = torch.zeros(total, dtype=torch.float64, device=run.device)
    first = piece.in_param.start % (total * inner)  # where every part begins in its row
    for part in torch.split(run, max(_SQUARED_NUMEL // (total * inner), 1) * total * inner):
        squares = pad(part.double().square(), (first, -(first + part.numel()) % (total * inner)))
        sums += squares.view(-1, total, inner).sum((0, 2))
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


@dataclass
class Schedule:
    """Where training is between selections and windows.

    Steps count from the first one in which a matrix has a gradient: until then no state tells where training is.

    Attributes:
        done: steps. in_window: those of them that the current window has.
        since_selection: steps since columns were selected, negative if they never were.
        interval: steps of a window after the warm-up.
    """

    policy: Selective
    done: int = 0
    in_window: int = 0
    since_selection: int = NEVER
    interval: int = 0

    def __post_init__(self) -> None:
        fixed = self.policy.update_interval
        self.interval = self.interval or _FIRST_INTERVAL if isinstance(fixed, str) else fixed

    @property
    def selects(self) -> bool:
        """Whether the next step selects columns: only at the beginning of a window, when nothing waits."""
        due = self.since_selection < 0 or self.since_selection >= self.policy.select_interval
        return due and not self.in_window and self.done >= self.policy.warmup_steps

    @property
    def closes(self) -> bool:
        """Whether the next step ends its window."""
        return self.done < self.policy.warmup_steps or self.in_window + 1 >= self.interval

    def selected(self, share_left: float) -> None:
        """Note that columns are selected, which leaves so much of the gradient's norm to the others."""
        self.since_selection = 0
        if self.policy.update_interval == "auto":
            factor = 0.5 if share_left > _MUCH_LEFT else 2 if share_left < _LITTLE_LEFT else 1
            self.interval = min(max(int(self.interval * factor), 1), _LONGEST_INTERVAL)

    def stepped(self) -> None:
        """Count a step."""
        self.done, self.in_window = self.done + 1, 0 if self.closes else self.in_window + 1
        if self.since_selection >= 0:
            self.since_selection += 1

    def first_columns(self, shape: torch.Size) -> Tensor:
        """A mask of what is selected of a new parameter: of a matrix, none before others have columns selected."""
        ratio = 0.0 if self.since_selection < 0 else self.policy.topk_ratio
        count = selected_count(ratio, shape[-1]) if is_matrix(shape) else 1
        return torch.arange(columns_of(shape), dtype=torch.int64, device="cpu") < count

    def position(self) -> tuple[int, int, int, int]:
        """The schedule's state, as numbers."""
        return self.done, self.in_window, self.since_selection, self.interval

    def resume(self, position: Iterable[float]) -> None:
        """Go on from a :meth:`position`; a fixed interval is the policy's own, whatever the saved one was."""
        self.done, self.in_window, self.since_selection, self.interval = map(int, position)
        self.__post_init__()


def selected_count(ratio: float, columns: int) -> int:
    """How many columns of a matrix are selected."""
    return min(max(round(ratio * columns), 1), columns) if ratio > 0 else 0


def largest(squares: Tensor, count: int) -> Tensor:
    """A mask of the ``count`` columns with the largest sums of squares.

    Compared as fp32, so that it does not matter in what order fp64 sums were made, except where two columns are as good
    as equal. Of equal ones the first is taken; a NaN is larger than everything.
    """
    rounded = squares.float().nan_to_num(nan=math.inf, posinf=math.inf)
    best = torch.sort(rounded, descending=True, stable=True).indices[:count]
    return torch.zeros_like(squares, dtype=torch.bool).index_fill_(0, best, True)


def select_columns(ratio: float, squares: Mapping[int, Tensor], group: Group) -> tuple[dict[int, Tensor], float]:
    """A mask of the selected columns per matrix, and the share of the norm in the others (or NaN). Collective.

    One all-gather of 8 bytes per column; sums are added in rank order.

    Args:
        squares: this rank's sums of squares, (columns,) fp64, of all matrices by global index, the same on every rank.
    """
    mine = torch.cat([torch.zeros(0, dtype=torch.float64, device="cpu"), *squares.values()])
    everything = sum(group.all_gather(mine), torch.zeros_like(mine))
    split = torch.split(everything, [of.numel() for of in squares.values()])
    sums = dict(zip(squares, split, strict=True))
    chosen = {i: largest(of, selected_count(ratio, of.numel())) for i, of in sums.items()}
    total, taken = float(everything.sum()), sum(float(of[chosen[i]].sum()) for i, of in sums.items())
    return chosen, math.sqrt(max(1 - taken / total, 0.0)) if 0 < total < math.inf else math.nan
