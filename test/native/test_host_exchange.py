"""The shared-memory exchange between threads, each of which plays a rank with an arena of its own."""

from __future__ import annotations

import mmap
import os
import signal
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

from zero_opt.comm.exchange import mean_in_tree_order
from zero_opt.kernels import grad_squares

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


def named(number: int) -> tuple[int, int, int]:
    """The ident of an exchange."""
    return 0, 0, number


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
        mean_in_tree_order(parts, mean)
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
                named(n), b[r], shards[r].data_ptr(), published, 0.01
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
        lambda published, r=rank: ranks.ranks[r].reduce(named(1), buckets[r], shards[r].data_ptr(), published, 0.01)
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
        lambda published, r=rank: ranks.ranks[r].gather(named(1), buckets[r], published, 0.01)
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
        return lambda published: ranks.ranks[rank].reduce(
            named(ident), filled, shards[rank].data_ptr(), published, 0.01
        )

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
        return ranks.ranks[rank].reduce(named(ident), filled[rank], shard.data_ptr(), published, 0.0)

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
    assert ranks.ranks[0].reduce(named(1), filled[0], shards[0].data_ptr(), 0, 0.0) == (NOT_YET, 1, 1)
    published = [1, 0]
    states = [NOT_YET, NOT_YET]
    while NOT_YET in states:
        for rank in (1, 0):
            if states[rank] == NOT_YET:
                states[rank], _, published[rank] = ranks.ranks[rank].reduce(
                    named(1), filled[rank], shards[rank].data_ptr(), published[rank], 0.0
                )
    assert torch.equal(torch.cat(shards), (grads[0][0] + grads[1][0]) / 2)
    ranks.close()


SLOT_WORDS, BELL_AT = 5, 80  # of 64 bits: how often written, step, epoch, sequence, piece; bytes


def words_of(ranks: Ranks, rank: int, slot: int) -> Tensor:
    """What a rank says of a slot."""
    start = 8 * SLOT_WORDS * slot
    return ranks.arenas[rank][start : start + 8 * SLOT_WORDS].view(torch.int64)


IDENTS = [0, 2**20 - 1, 2**20, 2**24 - 2, 2**24 - 1, 2**24, 2**32 - 1, 2**32, 2**40, 2**63 - 1]
NEIGHBOURS = [
    *(((low, 2**62, 2**62), (high, 0, 0)) for low, high in pairwise(IDENTS)),
    *(((7, low, 2**62), (7, high, 0)) for low, high in pairwise(IDENTS)),
    *(((7, 7, low), (7, 7, high)) for low, high in pairwise(IDENTS)),
]


@pytest.mark.parametrize(("before", "after"), NEIGHBOURS, ids=str)
def test_idents_are_in_order_however_large(before: tuple[int, int, int], after: tuple[int, int, int]) -> None:
    plan = one_run(30, 2)
    ranks, shards = Ranks(2, plan.slot_bytes), [torch.zeros(15), torch.zeros(15)]
    grads = [run_tensors(plan, rank, 0) for rank in range(2)]
    filled = [bucket(plan, grads[rank], rank) for rank in range(2)]

    def reduce(rank: int, ident: tuple[int, int, int], published: int) -> Any:
        return ranks.ranks[rank].reduce(ident, filled[rank], shards[rank].data_ptr(), published, 0.0)

    assert reduce(0, before, 0)[0] == NOT_YET
    assert reduce(1, after, 0)[0] == NOT_YET  # without the one before
    assert reduce(0, before, 1)[0] == PASSED
    assert reduce(0, after, 0)[0] in DONE
    assert reduce(1, after, 1)[0] in DONE
    assert torch.equal(torch.cat(shards), (grads[0][0] + grads[1][0]) / 2)
    ranks.close()


def test_what_counts_publications_may_wrap() -> None:
    """A bell of 32 bits, on which peers sleep, and how often a slot was written, beyond 32."""
    plan = one_run(3000, 2)
    ranks, shards = Ranks(2, plan.slot_bytes), [torch.zeros(1500), torch.zeros(1500)]
    grads = [run_tensors(plan, rank, 0) for rank in range(2)]
    filled = [bucket(plan, grads[rank], rank) for rank in range(2)]
    for arena in ranks.arenas:
        arena[BELL_AT : BELL_AT + 4].view(torch.int32).fill_(-3)
    for rank, slot in ((0, 0), (0, 1), (1, 0), (1, 1)):
        words_of(ranks, rank, slot)[0] = 2**32 - 4
    calls = [
        lambda published, r=rank: ranks.ranks[r].reduce(named(1), filled[r], shards[r].data_ptr(), published, 60.0)
        for rank in range(2)
    ]
    assert all(state in DONE for state in ranks.all_at_once(calls))
    assert torch.equal(torch.cat(shards), (grads[0][0] + grads[1][0]) / 2)
    assert all(0 < int(arena[BELL_AT : BELL_AT + 4].view(torch.int32)) < 1000 for arena in ranks.arenas)
    assert all(int(words_of(ranks, rank, slot)[0]) > 2**32 for rank in range(2) for slot in range(2))
    ranks.close()


def test_words_that_are_being_written_say_nothing() -> None:
    plan = one_run(30, 2)
    ranks, shards = Ranks(2, plan.slot_bytes), [torch.zeros(15), torch.zeros(15)]
    filled = [bucket(plan, run_tensors(plan, rank, 0), rank) for rank in range(2)]

    def reduce(rank: int, published: int) -> Any:
        return ranks.ranks[rank].reduce(named(5), filled[rank], shards[rank].data_ptr(), published, 0.0)

    assert reduce(0, 0)[0] == NOT_YET
    assert words_of(ranks, 0, 0).tolist() == [2, 0, 0, 5, 0]
    for sequence in (5, 6):  # this exchange, or a later one
        words_of(ranks, 0, 0)[[0, 3]] = torch.tensor([3, sequence])
        assert reduce(1, 1 if sequence == 6 else 0)[0] == NOT_YET
    words_of(ranks, 0, 0)[[0, 3]] = torch.tensor([4, 5])
    assert reduce(1, 1)[0] in DONE
    ranks.close()


ROUNDS = 20_000


def _publish_two(shared: Tensor, turn: Tensor) -> None:
    """As a peer does that comes to an exchange in slot 0, and to the next one in slot 1, faster than any peer could."""
    words = shared[: 16 * SLOT_WORDS].view(torch.int64)
    order = torch.tensor([0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 5])  # writes, the words, writes again
    for number in range(1, ROUNDS + 1):
        first, second = ([2 * number - 1, 0, 0, 2 * number + of, 0, 2 * number] for of in (0, 1))
        values = torch.tensor([*first, *second])
        while turn[0] != number:
            os.sched_yield()
        words.scatter_(0, order, values)


def test_a_peer_that_has_gone_on_is_not_seen_without_what_it_did_before() -> None:
    """Slots are looked at one after the other: this exchange and the next one may come in between."""
    arenas = [torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8) for _ in range(2)]
    turn = arenas[0][2048:2056].view(torch.int64)
    pid = os.fork()
    if pid == 0:
        signal.alarm(600)  # should the other process have failed, nobody else would end this one
        _publish_two(arenas[1], turn)
        os._exit(0)
    ranks = _native.HostRanks(0, [arena.data_ptr() for arena in arenas], DATA_AT, 128)
    grad, shard = torch.ones(2), torch.zeros(1)
    filled = _native.HostBucket([(0, 2, grad.data_ptr(), False)], [0, 1, 2], "float32")
    passed = 0
    for number in range(1, ROUNDS + 1):
        state, _, published = ranks.reduce(named(2 * number), filled, shard.data_ptr(), 0, 0.0)
        turn.fill_(number)
        while state == NOT_YET:
            state, _, published = ranks.reduce(named(2 * number), filled, shard.data_ptr(), published, 4e-6)
        passed += state == PASSED
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert passed == 0
