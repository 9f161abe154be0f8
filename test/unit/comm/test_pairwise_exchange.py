"""How a shard is cut into messages."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_opt.comm import pairwise_exchange
from zero_opt.comm.exchange import Run
from zero_opt.comm.pairwise_exchange import plan_messages
from zero_opt.layout import Span

MOST = pairwise_exchange._MOST_MESSAGES


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Run], int, int, int]:
    """Runs with gaps, part of the bucket they are in, and the size of an element."""
    unit = draw(st.sampled_from([1, 1000, 100_000]))
    runs, start = [], draw(st.integers(0, 5))
    for _ in range(draw(st.integers(0, 40))):
        numel = draw(st.integers(0, 20)) * unit
        runs.append(Run(start, numel, None))
        start += numel + draw(st.integers(0, 70))
    low = draw(st.integers(0, start))
    return runs, low, draw(st.integers(low, start)), draw(st.sampled_from([1, 2, 4, 16]))


@given(cases())
def test_messages_follow_each_other_and_are_few(case: tuple[list[Run], int, int, int]) -> None:
    runs, low, high, itemsize = case
    messages = plan_messages(runs, low, high, itemsize)
    assert len(messages) <= MOST
    assert all(start < stop for start, stop in messages)
    assert [low, *(stop for _, stop in messages)] == [*(start for start, _ in messages), high]


@given(cases())
def test_a_long_run_is_a_message_by_itself(case: tuple[list[Run], int, int, int]) -> None:
    runs, low, high, itemsize = case
    messages = plan_messages(runs, low, high, itemsize)
    least = max(pairwise_exchange._LEAST_BYTES // itemsize, (high - low) // 12, 1)
    for run in runs:
        part = Span(max(run.start, low), min(run.start + run.numel, high))
        if part.stop - part.start >= least:
            assert part in messages


def test_both_ends_cut_alike_whatever_gradients_they_lack() -> None:
    numel = pairwise_exchange._LEAST_BYTES
    full = [Run(0, 10, torch.ones(10)), Run(64, numel, torch.ones(numel)), Run(64 + numel, 5, torch.ones(5))]
    bare = [run._replace(tensor=None) for run in full]
    assert plan_messages(full, 0, numel + 69, 4) == plan_messages(bare, 0, numel + 69, 4)
    assert plan_messages(full, 0, numel + 69, 4) == [Span(0, 64), Span(64, 64 + numel), Span(64 + numel, numel + 69)]
