"""When columns are selected and stepped, and which: decisions that are the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm.groups import Group
from ...policies import Selective

# Of ``update_interval="auto"``.
_FIRST_INTERVAL, _LONGEST_INTERVAL = 4, 16
_MUCH_LEFT, _LITTLE_LEFT = 0.75, 0.5
_NEVER = -1


@dataclass
class Schedule:
    """Where training is between selections and windows.

    Attributes:
        done: steps. in_window: those of them that the current window has.
        since_selection: steps since columns were selected, negative if they never were.
        interval: steps of a window after the warm-up.
    """

    policy: Selective
    done: int = 0
    in_window: int = 0
    since_selection: int = _NEVER
    interval: int = 0

    def __post_init__(self) -> None:
        fixed = self.policy.update_interval
        if not isinstance(fixed, str):
            self.interval = fixed
        elif not self.interval:
            self.interval = _FIRST_INTERVAL

    @property
    def warmed_up(self) -> bool:
        """Whether the warm-up is over."""
        return self.done >= self.policy.warmup_steps

    @property
    def selects(self) -> bool:
        """Whether the next step selects columns: only at the beginning of a window, when nothing waits."""
        due = self.since_selection < 0 or self.since_selection >= self.policy.select_interval
        return self.warmed_up and not self.in_window and due

    @property
    def closes(self) -> bool:
        """Whether the next step ends its window."""
        return not self.warmed_up or self.in_window + 1 >= self.interval

    def selected(self, share_left: float) -> None:
        """Note that columns were selected, which left so much of the gradient's norm to the others."""
        self.since_selection = 0
        if self.policy.update_interval == "auto":
            if share_left > _MUCH_LEFT:
                self.interval = max(self.interval // 2, 1)
            elif share_left < _LITTLE_LEFT:
                self.interval = min(self.interval * 2, _LONGEST_INTERVAL)

    def stepped(self) -> None:
        """Count a step."""
        closed = self.closes
        self.done += 1
        self.in_window = 0 if closed else self.in_window + 1
        if self.since_selection >= 0:
            self.since_selection += 1

    def position(self) -> tuple[int, int, int, int]:
        """The schedule's state, as numbers."""
        return self.done, self.in_window, self.since_selection, self.interval

    def at(self, position: Sequence[int]) -> Schedule:
        """A schedule at a :meth:`position`; a fixed interval is the policy's own, whatever the saved one was."""
        return Schedule(self.policy, *position)


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


class Selector:
    """Selects the columns of all parameters, from what every rank has of them.

    Args:
        totals: per parameter, by global index, how many columns it has.
    """

    def __init__(self, ratio: float, totals: Mapping[int, int], group: Group) -> None:
        self._ratio, self._totals, self._group = ratio, totals, group

    def select(self, squares: Mapping[int, tuple[int, Tensor]]) -> tuple[dict[int, Tensor], float]:
        """The selected columns per parameter, and the share of the norm in the others (or NaN). Collective.

        One all-gather of 8 bytes per column; sums are added in rank order.

        Args:
            squares: this rank's sums of squares, fp64, and the number of the column that they begin with.
        """
        widths = list(self._totals.values())
        mine = torch.zeros(sum(widths), dtype=torch.float64, device="cpu")
        own = dict(zip(self._totals, torch.split(mine, widths), strict=True))
        for index, (first, sums) in squares.items():
            own[index][first : first + sums.numel()] = sums
        everything = torch.zeros_like(mine)
        for part in self._group.all_gather(mine):
            everything += part
        chosen: dict[int, Tensor] = {}
        total, taken = 0.0, 0.0
        for index, sums in zip(self._totals, torch.split(everything, widths), strict=True):
            chosen[index] = largest(sums, selected_count(self._ratio, sums.numel()))
            total, taken = total + float(sums.sum()), taken + float(sums[chosen[index]].sum())
        return chosen, math.sqrt(max(1 - taken / total, 0.0)) if 0 < total < math.inf else math.nan
