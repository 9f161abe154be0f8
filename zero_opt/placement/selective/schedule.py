"""When columns are selected and stepped, and which: decisions that are the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm.groups import Group
from ...policies import Selective
from .columns import is_matrix

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
            if share_left > _MUCH_LEFT:
                self.interval = max(self.interval // 2, 1)
            elif share_left < _LITTLE_LEFT:
                self.interval = min(self.interval * 2, _LONGEST_INTERVAL)

    def stepped(self) -> None:
        """Count a step."""
        self.done, self.in_window = self.done + 1, 0 if self.closes else self.in_window + 1
        if self.since_selection >= 0:
            self.since_selection += 1

    def first_columns(self, shape: torch.Size) -> Tensor:
        """What is selected of a new parameter: none before others have columns selected; what is no matrix, always."""
        ratio = 0.0 if self.since_selection < 0 else self.policy.topk_ratio
        count = selected_count(ratio, shape[-1]) if is_matrix(shape) else 1
        return torch.arange(count, dtype=torch.int64, device="cpu")

    def position(self) -> tuple[int, int, int, int]:
        """The schedule's state, as numbers."""
        return self.done, self.in_window, self.since_selection, self.interval

    def resume(self, position: Iterable[float]) -> None:
        """Go on from a :meth:`position`; a fixed interval is the policy's own, whatever the saved one was."""
        self.done, self.in_window, self.since_selection, self.interval = map(int, position)
        self.__post_init__()


def selected_count(ratio: float, columns: int) -> int:
    """How many columns of a parameter are selected."""
    return min(max(round(ratio * columns), 1), columns) if ratio > 0 else 0


def largest(squares: Tensor, count: int) -> Tensor:
    """Numbers of the ``count`` columns with the largest sums of squares, ascending.

    Compared as fp32, so that it does not matter in what order fp64 sums were made, except where two columns are as good
    as equal. Of equal ones the first is taken; a NaN is larger than everything.
    """
    rounded = squares.float().nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.sort(rounded, descending=True, stable=True).indices[:count].sort().values


def select_columns(
    ratio: float, totals: Mapping[int, int], squares: Mapping[int, Tensor], group: Group
) -> tuple[dict[int, Tensor], float]:
    """The selected columns per parameter, and the share of the norm in the others (or NaN). Collective.

    One all-gather of 8 bytes per column; sums are added in rank order.

    Args:
        totals: per parameter, by global index, how many columns it has; the same on every rank.
        squares: this rank's sums of squares, (columns,) fp64.
    """
    own = [squares.get(i, torch.zeros(n, dtype=torch.float64, device="cpu")) for i, n in totals.items()]
    mine = torch.cat([torch.zeros(0, dtype=torch.float64, device="cpu"), *own])
    everything = torch.zeros_like(mine)
    for part in group.all_gather(mine):
        everything += part
    chosen: dict[int, Tensor] = {}
    total, taken = float(everything.sum()), 0.0
    for index, sums in zip(totals, torch.split(everything, list(totals.values())), strict=True):
        chosen[index] = largest(sums, selected_count(ratio, sums.numel()))
        taken += float(sums[chosen[index]].sum())
    return chosen, math.sqrt(max(1 - taken / total, 0.0)) if 0 < total < math.inf else math.nan
