"""When columns are selected and stepped, and which."""

from __future__ import annotations

import math

import pytest
import torch

from test.support.harness import assert_bitwise
from zero_opt import Selective
from zero_opt.comm.alone_group import AloneGroup
from zero_opt.placement.selective.schedule import Schedule, largest, select_columns, selected_count


def walk(schedule: Schedule, steps: int, share: float = math.nan) -> str:
    """Per step: s where columns are selected, | where the window ends."""
    text = ""
    for _ in range(steps):
        if schedule.selects:
            schedule.selected(share)
            text += "s"
        text += "." if not schedule.closes else "|"
        schedule.stepped()
    return text


def test_windows_and_selections() -> None:
    """Selections wait for the beginning of a window; the warm-up has neither."""
    assert walk(Schedule(Selective(0.1, 5, 3)), 10) == "s..|..|s..|."
    assert walk(Schedule(Selective(0.1, 1, 2, 3)), 8) == "|||s.|s.|s."
    assert walk(Schedule(Selective(0.1, 4, 1)), 9) == "s||||s||||s|"


@pytest.mark.parametrize(
    ("share", "intervals"),
    [(0.76, [4, 2, 1, 1]), (0.75, [4] * 4), (0.5, [4] * 4), (0.49, [4, 8, 16, 16]), (math.nan, [4] * 4)],
)  # fmt: skip
def test_an_automatic_window_goes_by_what_is_left_waiting(share: float, intervals: list[int]) -> None:
    """Halved above 3/4 of the norm, doubled below 1/2, from 1 to 16; fixed ones stay."""
    schedule, fixed = Schedule(Selective(update_interval="auto")), Schedule(Selective(update_interval=3))
    for expected in intervals:
        assert (schedule.interval, fixed.interval) == (expected, 3)
        schedule.selected(share)
        fixed.selected(share)


@pytest.mark.parametrize("steps", range(12))
def test_a_position_is_all_there_is_to_know(steps: int) -> None:
    """A schedule made anew goes on like the old one; a fixed interval is what the policy says."""
    policy = Selective(0.1, 3, "auto", 2)
    schedule = Schedule(policy)
    walk(schedule, steps, 0.4)
    again = Schedule(policy)
    again.resume(schedule.position())
    assert walk(again, 9, 0.9) == walk(schedule, 9, 0.9)
    fixed = Schedule(Selective(update_interval=7))
    fixed.resume(schedule.position())
    assert fixed.interval == 7


def test_the_largest_columns() -> None:
    """Equal ones by number; what is not finite is largest; sums that differ less than fp32 tells are equal."""
    sums = torch.tensor([1.0, 3.0, 3.0 * (1 + 1e-12), 2.0, 3.0], dtype=torch.float64)
    assert largest(sums, 2).nonzero().flatten().tolist() == [1, 2]
    assert not largest(sums, 0).any()
    assert largest(torch.tensor([5.0, math.nan, math.inf], dtype=torch.float64), 2).tolist() == [False, True, True]
    assert [selected_count(ratio, 30) for ratio in (0.0, 1e-9, 0.1, 0.5, 1.0)] == [0, 1, 3, 15, 30]


def test_selection_over_parameters_and_what_is_left() -> None:
    """Each parameter has its own; one without a gradient its first; the share is of all together."""
    group, none = AloneGroup(), {i: torch.zeros(n, dtype=torch.float64) for i, n in {1: 4, 5: 2, 7: 3}.items()}
    squares = none | {
        1: torch.tensor([0.0, 9.0, 1.0, 4.0], dtype=torch.float64),
        5: torch.tensor([0.0, 2.0], dtype=torch.float64),
    }
    chosen, share = select_columns(0.5, squares, group)
    numbers = {key: value.nonzero().flatten().tolist() for key, value in chosen.items()}
    assert_bitwise(numbers, {1: [1, 3], 5: [1], 7: [0, 1]})
    assert share == pytest.approx(math.sqrt(1 / 16))
    assert math.isnan(select_columns(0.5, none, group)[1])
