"""When columns are selected and stepped, and which: decisions that are the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm.groups import Group
from ...policies import Selective
from .columns import columns_of, is_matrix

# Of ``update_interval="auto"``.
_FIRST_INTERVAL, _LONGEST_INTERVAL = 4, 16
_MUCH_LEFT, _LITTLE_LEFT = 0.75, 0.5
NEVER = -1


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
