"""How a shard is cut into messages."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_opt.comm import headed_messages, pairwise_exchange
from zero_opt.comm.exchange import BucketReduction, Ident, Run, StagingPool, run_spans_within
from zero_opt.comm.headed_messages import MOST_MESSAGES
from zero_opt.comm.pairwise_exchange import PairwiseExchange, Stretch, plan_messages
from zero_opt.layout import Span


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


def spans(messages: list[Stretch]) -> list[Span]:
    return [message.span for message in messages]


@given(cases())
def test_each_message_has_the_runs_that_are_in_it(case: tuple[list[Run], int, int, int]) -> None:
    runs, low, high, itemsize = case
    for span, run_spans in plan_messages(runs, low, high, itemsize):
        assert list(run_spans) == list(run_spans_within(runs, span))


@given(cases())
def test_messages_follow_each_other_and_are_few(case: tuple[list[Run], int, int, int]) -> None:
    runs, low, high, itemsize = case
    messages = spans(plan_messages(runs, low, high, itemsize))
    assert len(messages) <= MOST_MESSAGES
    assert all(start < stop for start, stop in messages)
    assert [low, *(stop for _, stop in messages)] == [*(start for start, _ in messages), high]


@given(cases())
def test_a_long_run_is_a_message_by_itself(case: tuple[list[Run], int, int, int]) -> None:
    runs, low, high, itemsize = case
    messages = spans(plan_messages(runs, low, high, itemsize))
    least = max(pairwise_exchange._LEAST_BYTES // itemsize, (high - low) // 12, 1)
    for run in runs:
        part = Span(max(run.start, low), min(run.start + run.numel, high))
        if part.stop - part.start >= least:
            assert part in messages


def test_both_ends_cut_alike_whatever_gradients_they_lack() -> None:
    numel = pairwise_exchange._LEAST_BYTES
    full = [Run(0, 10, torch.ones(10)), Run(64, numel, torch.ones(numel)), Run(64 + numel, 5, torch.ones(5))]
    bare = [run._replace(tensor=None) for run in full]
    cut = spans(plan_messages(full, 0, numel + 69, 4))
    assert cut == spans(plan_messages(bare, 0, numel + 69, 4))
    assert cut == [Span(0, 64), Span(64, 64 + numel), Span(64 + numel, numel + 69)]


class Received:
    """What rank 0 of two receives."""

    def __init__(self, tensor: Tensor, sent: dict[int, Tensor], tag: int) -> None:
        self._tensor, self._sent, self._tag = tensor, sent, tag

    def wait(self) -> None:
        """The other rank sends the same as this one."""
        self._tensor.copy_(self._sent[self._tag])


class Recorded:
    """The messages of rank 0 of two with a rank that sends the same, in the order in which they are started."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.started: list[str] = []
        self._sent: dict[int, Tensor] = {}

    def send_to(self, tensor: Tensor, dst: int, tag: int) -> Recorded:
        self._sent[tag] = tensor.clone()
        self._start("send", tag)
        return self

    def receive_from(self, tensor: Tensor, src: int, tag: int) -> Received:
        self._start("receive", tag)
        return Received(tensor, self._sent, tag)

    def _start(self, what: str, tag: int) -> None:
        number, of_data = divmod(tag, 2)
        self.started.append(f"{what} {'data' if of_data else 'header'} {number}")

    def wait(self) -> None:
        """What is sent is not under way."""


def test_this_rank_is_ready_to_receive_before_it_sends_data() -> None:
    """Of an exchange the peer's data, and of later ones the headers, which else wait behind the data."""
    messages = Recorded()
    exchange = PairwiseExchange(messages, messages, StagingPool())
    for sequence in range(2):
        out = torch.zeros(4)
        ident, gradients = Ident(0, 0, sequence), Run(0, 8, torch.full((8,), sequence + 1.0))
        assert exchange.reduce_runs(BucketReduction(ident, [gradients], [0, 4, 8], out))
        assert out.tolist() == [sequence + 1.0] * 4
    order = {what: turn for turn, what in enumerate(messages.started)}
    headers = [order[f"receive header {number}"] for number in range(headed_messages._HEADERS_AHEAD)]
    assert order["send header 0"] < min(headers)
    assert max(headers) < order["receive data 0"] < order["send data 0"]
    assert order["send data 0"] < order["send header 1"] < order["receive data 1"] < order["send data 1"]
    assert f"receive header {headed_messages._HEADERS_AHEAD}" in order
