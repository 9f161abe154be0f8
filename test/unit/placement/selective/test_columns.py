"""Columns in and out of slices, and state that stays with its column whatever is selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from test.support.harness import assert_bitwise
from zero_opt.layout import Span, plan_flat
from zero_opt.placement.selective.column_shard import ColumnShard
from zero_opt.placement.selective.columns import Columns
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
def test_every_slice_gives_and_takes_its_columns(shape: tuple[int, ...], order: str) -> None:
    """Any start and stop: what is put back is what was taken, zeros stand for what is elsewhere."""
    value = arranged(shape, order)
    flat = FlatParam(value, "it")
    numbers = flat.flatten(torch.arange(shape[-1]).expand(shape))
    for start in range(flat.param.numel()):
        for stop in range(start + 1, flat.param.numel() + 1, 3):
            columns, run = Columns(shape, flat.strides, Span(start, stop)), flat.flat[start:stop].clone()
            there = numbers[start:stop]
            assert columns.first <= int(there.min()) <= int(there.max()) < columns.first + columns.width
            which = torch.randperm(columns.width, generator=torch.Generator().manual_seed(stop))
            taken = columns.take(run, which)
            assert taken.numel() == columns.numel == columns.width * columns.height
            for at, column in enumerate((which + columns.first).tolist()):
                found = taken[:, at][taken[:, at] != 0].sort().values
                assert_bitwise(found, run[there == column].sort().values)
            other = torch.zeros_like(run)
            columns.put(other, which[: len(which) // 2], taken[:, : len(which) // 2])
            kept = torch.isin(there, which[: len(which) // 2] + columns.first)
            assert_bitwise(other, torch.where(kept, run, 0.0))
            sums = torch.zeros(columns.width, dtype=torch.float64)
            sums.index_add_(0, there - columns.first, run.double().square())
            torch.testing.assert_close(columns.square_sums(run), sums, rtol=1e-14, atol=0)


def shard_of(dtype: torch.dtype, rank: int, world_size: int) -> ColumnShard:
    """Matrices of several orders of dimensions in one bucket."""
    shapes = (((5, 30), "rows"), ((12, 20), "last first"), ((2, 3, 4, 5), "channels last"))
    flats = [FlatParam(arranged(shape, order).to(dtype), f"{index}") for index, (shape, order) in enumerate(shapes)]
    (layout,) = plan_flat({index: flat.spec(0) for index, flat in enumerate(flats)}, world_size, 1e9)
    bucket = GradBucket(layout, [flats[index] for index in layout.params], rank, torch.float32)
    return ColumnShard(bucket, range(len(bucket.slices)))


def home_of(shard: ColumnShard, position: int) -> dict[str, Any]:
    state = shard.blank_state(position, amsgrad=False)
    return {key: value for key, value in state.items() if key != "step"}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_state_stays_with_its_column(data: st.DataObject) -> None:
    """Selections of any columns one after the other, steps in between: every element is where its column is, once."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    world_size = data.draw(st.integers(1, 3))
    shard = shard_of(dtype, data.draw(st.integers(0, world_size - 1)), world_size)
    for position, found in enumerate(shard.slices):
        home, total = home_of(shard, position), found.columns.total
        numel = shard.pieces[position].in_param.numel
        values = {key: torch.rand(numel, generator=torch.Generator().manual_seed(at)) for at, key in enumerate(KEYS)}
        if "master" in home:
            values["master"] = shard.param_run(position).float() * (1 + 2**-12)
        shard.place(position, values, home)
        counts = [0] * total
        for chosen in data.draw(st.lists(st.sets(st.integers(0, total - 1)), min_size=1, max_size=5)):
            shard.read_params()
            shard.select(position, torch.tensor(sorted(chosen), dtype=torch.int64), home)
            for key, value in values.items():
                assert_bitwise(shard.value(position, key, home), value)
            if found.selected_state:
                master = values.get("master", shard.param_run(position))
                assert_bitwise(found.selected_state["param"], found.take(master, found.selected))
            window = data.draw(st.integers(1, 5))
            for _ in range(window):
                found.gather(torch.ones(numel), 1.0)
            for selected, gradients in ((True, 1), (False, window)):
                blocks = found.selected if selected else found.at_home
                stretches = list(found.stretches(blocks, gradients))
                before = (
                    [counts[column + found.columns.first] for column in torch.cat(blocks).tolist()] if blocks else []
                )
                assert len(blocks) == len(set(before))
                assert before == sorted(before)
                steps = [s.steps + 1 for s in stretches for _ in range((s.stop - s.start) // found.columns.height)]
                expected = torch.tensor([(count + gradients) / gradients for count in before], dtype=torch.float32)
                assert steps == expected.tolist()
                found.count(selected=selected)
                for column in range(total):
                    counts[column] += gradients * ((column in chosen) == selected)
            found.count(selected=True)
            counts = [count + (column in chosen) for column, count in enumerate(counts)]
        assert found.counts.tolist() == counts
