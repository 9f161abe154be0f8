"""Columns in slices, when and which are selected, and state that stays with its column whatever is selected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from test.support.harness import assert_bitwise
from zero_opt import Selective
from zero_opt.comm.alone_group import AloneGroup
from zero_opt.kernels.adam_state import MOMENTS
from zero_opt.layout import ParamSlice, Span, plan_flat
from zero_opt.placement.masters import slices_of
from zero_opt.placement.native_rules import COLUMN_STEPS
from zero_opt.placement.selective.column_slice import ColumnSlice
from zero_opt.placement.selective.columns import (
    Schedule,
    largest,
    places_of,
    select_columns,
    selected_count,
    square_sums,
)
from zero_opt.sharding.buckets import GradBucket
from zero_opt.sharding.flat_param import FlatParam

KEYS = ("exp_avg", "exp_avg_sq")


def arranged(shape: tuple[int, ...], order: str) -> Tensor:
    """Numbers from 1 up, in an order of dimensions."""
    value = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    if order == "last first":
        return value.movedim(-1, 0).contiguous().movedim(0, -1)
    return value.contiguous(memory_format=torch.channels_last) if order == "channels last" else value


CASES = [((5, 7), "rows"), ((5, 7), "last first"), ((2, 3, 4, 5), "channels last"), ((6, 1), "rows"), ((1, 9), "rows")]


@pytest.mark.parametrize(("shape", "order"), CASES)
def test_every_slice_knows_where_its_columns_are(shape: tuple[int, ...], order: str) -> None:
    """Any start and stop, and any columns."""
    flat = FlatParam(arranged(shape, order), "it")
    numbers = flat.flatten(torch.arange(shape[-1]).expand(shape))
    for start in range(flat.numel):
        for stop in range(start + 1, flat.numel + 1, 3):
            span = Span(start, stop)
            piece, run, there = ParamSlice(0, 0, span, span, span), flat.flat[start:stop].clone(), numbers[start:stop]
            shuffled = torch.randperm(shape[-1], generator=torch.Generator().manual_seed(stop))
            chosen = shuffled[: stop % 5].sort().values
            mask = torch.isin(torch.arange(shape[-1]), chosen)
            assert_bitwise(places_of(mask, piece, flat), torch.isin(there, chosen).nonzero().view(-1))
            wide = run.double()
            sums = torch.zeros(shape[-1], dtype=torch.float64).index_add_(0, there, wide.square())
            torch.testing.assert_close(square_sums(run, piece, flat), sums, rtol=1e-14, atol=0)
            torch.testing.assert_close(square_sums(wide, piece, flat), sums, rtol=1e-14, atol=0)
            assert_bitwise(wide, run.double())


def slices(dtype: torch.dtype, rank: int, world_size: int) -> list[ColumnSlice]:
    """Matrices of several orders of dimensions in one bucket."""
    shapes = (((5, 30), "rows"), ((12, 20), "last first"), ((2, 3, 4, 5), "channels last"))
    flats = [FlatParam(arranged(shape, order).to(dtype), f"{index}") for index, (shape, order) in enumerate(shapes)]
    (layout,) = plan_flat({index: flat.spec(0) for index, flat in enumerate(flats)}, world_size, 1e9)
    bucket = GradBucket(layout, [flats[index] for index in layout.params], rank, torch.float32)
    return [ColumnSlice(piece, flat, Schedule(Selective())) for piece, flat in zip(*slices_of(bucket), strict=True)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_state_stays_with_its_column(data: st.DataObject) -> None:
    """Selections of any columns one after the other, steps in between: every element is where its column is, once."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    world_size = data.draw(st.integers(1, 3))
    for found in slices(dtype, data.draw(st.integers(0, world_size - 1)), world_size):
        run, total, steps = found.param_run(0), found.mask.numel(), 0
        values: dict[str, Any] = {
            key: torch.rand(run.numel(), generator=torch.Generator().manual_seed(at)) for at, key in enumerate(KEYS)
        }
        if dtype is not torch.float32:
            values["master"] = run.float() * (1 + 2**-12)
        saved = {key: found.shaped(value, 0) for key, value in values.items()}
        found.load({}, found.state_at_home(saved, MOMENTS))
        for chosen in data.draw(st.lists(st.sets(st.integers(0, total - 1)), min_size=1, max_size=5)):
            found.begin_step()
            found.select(torch.tensor([column in chosen for column in range(total)]))
            for key, value in values.items():
                assert_bitwise(found[key].reshape(-1), found.shaped(value, 0).reshape(-1))
            for key, value in found.selected.items():
                ours = values.get("master", run) if key == "param" else values[key]
                assert_bitwise(value, found.take(ours).float())
                if key != "param":  # what is at home is meaningless
                    found.flat_grad(0, found.home[key])[found.places] = 9
            assert found[COLUMN_STEPS].flatten().tolist() == [steps] * total
            window, waits = data.draw(st.integers(1, 5)), len(chosen) < total
            for _ in range(window):
                found.gather(torch.ones(run.numel()), 1.0)
            assert found.gathered == window * waits
            counts = [steps + window * (column in chosen) for column in range(total)]
            assert found[COLUMN_STEPS].flatten().tolist() == counts
            mean = found.take_mean()
            assert (mean is not None) == waits
            if mean is not None:
                assert_bitwise(mean.reshape(-1), torch.ones(run.numel()))
                assert found.home["step"] == torch.tensor((steps + window) / window, dtype=torch.float32) - 1
            steps += window
            assert found[COLUMN_STEPS].flatten().tolist() == [steps] * total


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
