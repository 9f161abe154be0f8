"""How a shard is cut into messages."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_opt.comm import headed_messages, pairwise_exchange
from zero_opt.comm.exchange import BucketReduction, Ident, ParamRuns, Run, StagingPool
from zero_opt.comm.headed_messages import MOST_MESSAGES
from zero_opt.comm.pairwise_exchange import PairwiseExchange, plan_messages


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Run], list[int], int]:
    """Runs with gaps, the bounds of shards of the bucket they are in, and the size of an element."""
    unit = draw(st.sampled_from([1, 1000, 100_000]))
    runs, start = [], draw(st.integers(0, 5))
    for _ in range(draw(st.integers(0, 40))):
        numel = draw(st.integers(0, 20)) * unit
        runs.append(Run(start, numel, None))
        start += numel + draw(st.integers(0, 70))
    bounds = sorted(draw(st.lists(st.integers(0, start), min_size=1, max_size=4)))
    return runs, [0, *bounds], draw(st.sampled_from([1, 2, 4, 16]))


@given(cases())
def test_messages_carry_each_element_of_a_shard_once(case: tuple[list[Run], list[int], int]) -> None:
    runs, bounds, itemsize = case
    for (low, high), plan in zip(pairwise(bounds), plan_messages(runs, bounds, itemsize), strict=True):
        assert len(plan) <= MOST_MESSAGES
        assert all(parcel.numel > 0 for parcel in plan)
        assert all(parcel.numels == [part.in_run.stop - part.in_run.start for part in parcel.parts] for parcel in plan)
        assert all(parcel.numel == sum(parcel.numels) for parcel in plan)
        carried = sorted((part for parcel in plan for part in parcel.parts), key=lambda part: part.run)
        spans = [(part.run, part.in_shard.start + low, part.in_shard.stop + low) for part in carried]
        within = [(turn, max(run.start, low), min(run.start + run.numel, high)) for turn, run in enumerate(runs)]
        assert spans == [span for span in within if span[1] < span[2]]
        for turn, in_run, in_shard in carried:
            assert runs[turn].start + in_run.start == in_shard.start + low
            assert in_run.stop - in_run.start == in_shard.stop - in_shard.start


@given(cases())
def test_a_long_run_is_a_message_by_itself_and_all_others_are_one(case: tuple[list[Run], list[int], int]) -> None:
    runs, bounds, itemsize = case
    for (low, high), plan in zip(pairwise(bounds), plan_messages(runs, bounds, itemsize), strict=True):
        least = max(pairwise_exchange._LEAST_BYTES // itemsize, (high - low) // (MOST_MESSAGES - 1), 1)
        lengths = [min(run.start + run.numel, high) - max(run.start, low) for run in runs]
        long = [turn for turn, numel in enumerate(lengths) if numel >= least]
        assert [parcel.parts[0].run for parcel in plan[: len(long)]] == long
        short = [part for parcel in plan[len(long) :] for part in parcel.parts]
        assert len(plan) == len(long) + bool(short)
        assert [part.run for part in short] == [turn for turn, numel in enumerate(lengths) if 0 < numel < least]


def test_both_ends_cut_alike_whatever_gradients_they_lack() -> None:
    numel = pairwise_exchange._LEAST_BYTES
    full = [Run(0, 10, torch.ones(10)), Run(64, numel, torch.ones(numel)), Run(64 + numel, 5, torch.ones(5))]
    bare = [run._replace(tensor=None) for run in full]
    [plan] = plan_messages(full, [0, numel + 69], 4)
    assert [plan] == list(plan_messages(bare, [0, numel + 69], 4))
    assert [parcel.numels for parcel in plan] == [[numel], [10, 5]]


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


def test_a_gather_uses_the_buffer_that_the_pool_has_now() -> None:
    """The pool replaces it once a larger one is needed: here by a bucket of more short parameters."""
    messages, pool = Recorded(), StagingPool()
    exchange = PairwiseExchange(messages, messages, pool)
    few, many = (ParamRuns(Run(8 * turn, 8, torch.zeros(8)) for turn in range(2 * per_rank)) for per_rank in (2, 5))
    for step, runs in enumerate([few, few, many, few, few]):
        for turn, run in enumerate(runs):
            assert run.values is not None
            run.values.fill_(10.0 * step + turn)
        own = len(runs) // 2
        exchange.gather_runs(Ident(step, 0, 0), runs, [0, 8 * own, 16 * own])()
        sent = [10.0 * step + turn for turn in range(own)]  # the other rank sends the same
        assert [float(run.values.unique()) for run in runs if run.values is not None] == 2 * sent
    [kept] = few.cache.values()
    now = pool.buffer(kept.slot, 1, torch.float32, torch.device("cpu"))
    assert kept.staging.buffer.data_ptr() == now.data_ptr()
