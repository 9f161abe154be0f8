"""The shared-memory exchange between threads, each of which plays a rank with an arena of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_opt.cpu_adam import grad_squares
from zero_opt.exchange import mean_in_rank_order

_native: Any = pytest.importorskip("zero_opt._native")

DATA_AT = 256
DONE, PASSED, NOT_YET = (0, 1), 2, 3
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Ranks:
    """Arenas of a few ranks and their views of them."""

    def __init__(self, world_size: int, slot_bytes: int) -> None:
        self.arenas = [torch.zeros(DATA_AT + 2 * slot_bytes, dtype=torch.uint8) for _ in range(world_size)]
        addresses = [arena.data_ptr() for arena in self.arenas]
        self.ranks = [_native.HostRanks(rank, addresses, DATA_AT, slot_bytes) for rank in range(world_size)]
        self._pool = ThreadPoolExecutor(world_size)

    def all_at_once(self, calls: Sequence[Any]) -> list[int]:
        """Every rank's call, each until its exchange is over; the states."""
        return list(self._pool.map(_to_the_end, calls))

    def close(self) -> None:
        self._pool.shutdown()


def _to_the_end(advance: Any) -> int:
    published, state = 0, NOT_YET
    while state == NOT_YET:
        state, _, published = advance(published)
    return int(state)


@dataclass
class Plan:
    """A bucket: bounds of the shards, runs as (start, numel), who lacks which, which are added."""

    dtype: str
    slot_bytes: int
    bounds: list[int]
    runs: list[tuple[int, int]]
    missing: list[list[bool]]
    add: list[bool]

    @property
    def world_size(self) -> int:
        return len(self.bounds) - 1


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world_size = draw(st.integers(2, 5))
    numels = draw(st.lists(st.integers(1, 300), min_size=1, max_size=6))
    gaps = draw(st.lists(st.integers(0, 20), min_size=len(numels), max_size=len(numels)))
    runs, start = [], 0
    for numel, gap in zip(numels, gaps, strict=True):
        runs.append((start, numel))
        start += numel + gap
    inner = sorted(draw(st.lists(st.integers(0, start), min_size=world_size - 1, max_size=world_size - 1)))
    flags = st.lists(st.booleans(), min_size=len(runs), max_size=len(runs))
    return Plan(
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        slot_bytes=64 * draw(st.integers(world_size, 12)),
        bounds=[0, *inner, start],
        runs=runs,
        missing=[draw(flags) for _ in range(world_size)],
        add=draw(flags),
    )


def run_tensors(plan: Plan, rank: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(31 * seed + rank)
    return [torch.randn(numel, generator=generator).to(DTYPES[plan.dtype]) for _, numel in plan.runs]


def bucket(plan: Plan, values: Sequence[Tensor], rank: int | None) -> Any:
    runs = []
    for position, ((start, numel), value) in enumerate(zip(plan.runs, values, strict=True)):
        absent = rank is not None and plan.missing[rank][position]
        runs.append((start, numel, 0 if absent else value.data_ptr(), plan.add[position]))
    return _native.HostBucket(runs, plan.bounds, plan.dtype)


def expected_shards(plan: Plan, grads: Sequence[Sequence[Tensor]], held: Sequence[Tensor]) -> list[Tensor]:
    found = [shard.clone() for shard in held]
    for position, (start, numel) in enumerate(plan.runs):
        parts = [
            torch.zeros_like(mine[position]) if plan.missing[rank][position] else mine[position]
            for rank, mine in enumerate(grads)
        ]
        mean = torch.empty_like(parts[0])
        mean_in_rank_order(iter(parts), plan.world_size, mean)
        for rank in range(plan.world_size):
            low, high = max(start, plan.bounds[rank]), min(start + numel, plan.bounds[rank + 1])
            if low < high:
                there = found[rank][low - plan.bounds[rank] : high - plan.bounds[rank]]
                part = mean[low - start : high - start]
                there.copy_(there + part if plan.add[position] else part)
    return found


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


@given(plans(), st.integers(1, 3))
def test_means_of_whatever_lies_anywhere(plan: Plan, exchanges: int) -> None:
    ranks = Ranks(plan.world_size, plan.slot_bytes)
    shards = [torch.ones(high - low).to(DTYPES[plan.dtype]) for low, high in zip(plan.bounds, plan.bounds[1:])]
    for number in range(1, exchanges + 1):
        grads = [run_tensors(plan, rank, number) for rank in range(plan.world_size)]
        expected = expected_shards(plan, grads, shards)
        buckets = [bucket(plan, grads[rank], rank) for rank in range(plan.world_size)]
        calls = [
            lambda published, r=rank, n=number, b=buckets: ranks.ranks[r].reduce(
                n, b[r], shards[r].data_ptr(), published, 0.01
            )
            for rank in range(plan.world_size)
        ]
        assert all(state in DONE for state in ranks.all_at_once(calls))
        assert [bits(shard) for shard in shards] == [bits(shard) for shard in expected]
    ranks.close()


SUM_NUMEL = 4096


@given(
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(2, 4),
    st.lists(st.integers(1, 3 * SUM_NUMEL), min_size=1, max_size=5),
    st.integers(4, 300),
    st.integers(0, 2**31),
)
def test_sums_of_squares_are_those_of_the_shard(
    dtype: str, world_size: int, numels: list[int], lines: int, seed: int
) -> None:
    """Whatever the pieces, of every run of a shard, with the bits that the sum over the finished shard has."""
    starts = [sum(numels[:at]) + 7 * at for at in range(len(numels))]
    end = starts[-1] + numels[-1]
    bounds = [end * rank // world_size for rank in range(world_size + 1)]
    runs = list(zip(starts, numels, strict=True))
    plan = Plan(dtype, 64 * lines, bounds, runs, [[False] * len(runs)] * world_size, [seed % 2 == 1] * len(runs))
    grads = [run_tensors(plan, rank, seed) for rank in range(world_size)]
    shards = [torch.ones(high - low).to(DTYPES[dtype]) for low, high in pairwise(bounds)]
    ranks, sums, buckets = Ranks(world_size, plan.slot_bytes), [], []
    for rank in range(world_size):
        low, high = bounds[rank], bounds[rank + 1]
        cuts = [(max(start, low) - low, min(start + numel, high) - low) for start, numel in runs]
        mine = [(a, b - a, torch.full((-(-(b - a) // SUM_NUMEL),), -1.0).double()) for a, b in cuts if a < b]
        listed = [(s, n, value.data_ptr(), plan.add[0]) for (s, n), value in zip(runs, grads[rank], strict=True)]
        buckets.append(_native.HostBucket(listed, bounds, dtype, [(a, n, place.data_ptr()) for a, n, place in mine]))
        sums.append(mine)
    calls = [
        lambda published, r=rank: ranks.ranks[r].reduce(1, buckets[r], shards[r].data_ptr(), published, 0.01)
        for rank in range(world_size)
    ]
    assert all(state in DONE for state in ranks.all_at_once(calls))
    ranks.close()
    for shard, mine in zip(shards, sums, strict=True):
        for start, numel, found in mine:
            for at, square in enumerate(found.tolist()):
                first = start + at * SUM_NUMEL
                part = shard[first : min(first + SUM_NUMEL, start + numel)]
                assert square == grad_squares([part]).total > 0


def test_sums_are_of_what_can_be_summed() -> None:
    with pytest.raises(ValueError, match="float64"):
        _native.HostBucket([], [0, 0, 0], "float64", [(0, 0, 64)])


@given(plans())
def test_gathers_every_shard_and_nothing_else(plan: Plan) -> None:
    ranks = Ranks(plan.world_size, plan.slot_bytes)
    params = [run_tensors(plan, rank, 0) for rank in range(plan.world_size)]
    expected = [value.clone() for value in params[0]]
    for (start, numel), value, *all_of_it in zip(plan.runs, expected, *params, strict=True):
        for rank, mine in enumerate(all_of_it):
            low, high = max(start, plan.bounds[rank]), min(start + numel, plan.bounds[rank + 1])
            if low < high:
                value[low - start : high - start] = mine[low - start : high - start]
    buckets = [bucket(plan, params[rank], None) for rank in range(plan.world_size)]
    calls = [
        lambda published, r=rank: ranks.ranks[r].gather(1, buckets[r], published, 0.01)
        for rank in range(plan.world_size)
    ]
    assert all(state in DONE for state in ranks.all_at_once(calls))
    for mine in params:
        assert [bits(value) for value in mine] == [bits(value) for value in expected]
    ranks.close()


def one_run(numel: int, world_size: int) -> Plan:
    bounds = [numel * rank // world_size for rank in range(world_size + 1)]
    return Plan("float32", 64 * world_size, bounds, [(0, numel)], [[False]] * world_size, [False])


def test_what_a_rank_skips_is_void_for_all_others_and_the_next_is_not() -> None:
    plan = one_run(1000, 3)
    ranks = Ranks(3, plan.slot_bytes)
    grads = [run_tensors(plan, rank, 0) for rank in range(3)]
    shards = [torch.zeros(high - low) for low, high in zip(plan.bounds, plan.bounds[1:])]

    def advance(rank: int, ident: int) -> Any:
        filled = bucket(plan, grads[rank], rank)
        return lambda published: ranks.ranks[rank].reduce(ident, filled, shards[rank].data_ptr(), published, 0.01)

    def both(rank: int) -> list[int]:
        return [_to_the_end(advance(rank, 5)), _to_the_end(advance(rank, 6))]

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(both, rank) for rank in (0, 2)]
        assert _to_the_end(advance(1, 6)) in DONE  # without 5
        for other in others:
            skipped, last = other.result()
            assert skipped == PASSED
            assert last in DONE
    expected = expected_shards(plan, grads, [torch.zeros_like(shard) for shard in shards])
    assert [bits(shard) for shard in shards] == [bits(shard) for shard in expected]
    ranks.close()


def test_a_peer_that_went_on_does_not_let_a_rank_run_ahead_of_another() -> None:
    """Else it could stage over what the other, slower, is still reading."""
    plan = one_run(30, 3)
    ranks = Ranks(3, plan.slot_bytes)
    filled = [bucket(plan, run_tensors(plan, rank, 0), rank) for rank in range(3)]
    shard = torch.zeros(10)

    def reduce(rank: int, ident: int, published: int) -> Any:
        return ranks.ranks[rank].reduce(ident, filled[rank], shard.data_ptr(), published, 0.0)

    assert reduce(0, 6, 0)[0] == NOT_YET  # without 5
    assert reduce(1, 5, 0) == (NOT_YET, 2, 1)
    assert reduce(2, 5, 0)[0] == PASSED
    assert reduce(1, 5, 1)[0] == PASSED
    ranks.close()


def test_says_who_has_not_come_and_goes_on_from_there() -> None:
    plan = one_run(600, 2)
    ranks = Ranks(2, plan.slot_bytes)
    grads = [run_tensors(plan, rank, 0) for rank in range(2)]
    shards = [torch.zeros(300), torch.zeros(300)]
    filled = [bucket(plan, grads[rank], rank) for rank in range(2)]
    assert ranks.ranks[0].reduce(1, filled[0], shards[0].data_ptr(), 0, 0.0) == (NOT_YET, 1, 1)
    published = [1, 0]
    states = [NOT_YET, NOT_YET]
    while NOT_YET in states:
        for rank in (1, 0):
            if states[rank] == NOT_YET:
                states[rank], _, published[rank] = ranks.ranks[rank].reduce(
                    1, filled[rank], shards[rank].data_ptr(), published[rank], 0.0
                )
    assert torch.equal(torch.cat(shards), (grads[0][0] + grads[1][0]) / 2)
    ranks.close()
