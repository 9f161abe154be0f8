"""Exchanges in two stages, and beside them in one, between threads, each of which plays a rank."""

from __future__ import annotations

import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from test.support.scenario import tree_sum
from zero_opt.comm import pairwise_exchange, pieces
from zero_opt.comm.exchange import BucketReduction, Exchange, Flow, Ident, ParamRuns, Run, StagingPool
from zero_opt.comm.hierarchical_exchange import HierarchicalExchange
from zero_opt.comm.pairwise_exchange import PairwiseExchange
from zero_opt.comm.shared_memory_exchange import HostExchange, ranks_per_host
from zero_opt.system.future import Future
from zero_opt.system.stages import Lane, UnderWay

_native: Any = pytest.importorskip("zero_opt._native")

DATA_AT, LINE_BYTES, PATIENCE_S = 256, 64, 30.0
PASSED, NOT_YET = 2, 3
Layout = tuple[int, int]  # hosts, and ranks of each
LAYOUTS: list[Layout] = [(2, 2), (4, 2), (2, 4), (3, 2)]
WORLD_SIZES = (2, 3, 4, 6, 8, 16)
# Elements of a bucket's runs, with a gap after each.
NUMELS, GAP = (300, 0, 7, 129, 1000), 3
TOTAL = sum(NUMELS) + GAP * len(NUMELS)
UnderWayMessages = dict[tuple[int, ...], "Message"]  # by sender, receiver, tag and number


def slot_bytes(count: int) -> int:
    """Staging of one rank that shares memory with so many, a cache line for each or more; small, for many pieces."""
    return max(256, LINE_BYTES * count)


class Message:
    """What one rank sends another: read where it is, once the other is ready to receive it and either of them waits."""

    def __init__(self) -> None:
        self._ends: dict[str, Tensor] = {}
        self._changed, self._read = threading.Condition(), False

    def begin(self, end: str, tensor: Tensor) -> Waiting:
        with self._changed:
            self._ends[end] = tensor.detach().view(-1).view(torch.uint8)
            self._changed.notify_all()
        return Waiting(self._complete)

    def _complete(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._ends) == 2, PATIENCE_S), "a message has no other end"
            if not self._read:
                self._ends["into"].copy_(self._ends["sent"])
                self._read = True


class Waiting:
    """A message under way."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end: Callable[[], object] | None = end

    def wait(self) -> None:
        assert self._end is not None, "gloo hangs in a second wait for a message"
        self._end()
        self._end = None


class Messages:
    """The messages of one thread."""

    def __init__(self, rank: int, world_size: int, under_way: UnderWayMessages) -> None:
        self.rank, self.world_size, self._under_way = rank, world_size, under_way
        self.sent_nbytes: dict[int, int] = defaultdict(int)
        self._counts: dict[tuple[int, ...], int] = defaultdict(int)

    def send_to(self, tensor: Tensor, dst: int, tag: int) -> Waiting:
        self.sent_nbytes[dst] += tensor.numel() * tensor.element_size()
        return self._message(self.rank, dst, tag).begin("sent", tensor)

    def receive_from(self, tensor: Tensor, src: int, tag: int) -> Waiting:
        return self._message(src, self.rank, tag).begin("into", tensor)

    def _message(self, *key: int) -> Message:
        """The next one between two ranks with a tag."""
        self._counts[key] += 1
        return self._under_way.setdefault((*key, self._counts[key]), Message())


class Memory:
    """What a thread shares with the threads of its host."""

    nbytes = 0

    def __init__(self, place: int, arenas: Sequence[Tensor], divisor: int) -> None:
        addresses = [arena.data_ptr() for arena in arenas]
        self._ranks = _native.HostRanks(place, addresses, DATA_AT, slot_bytes(len(arenas)), divisor)

    def reduce(self, ident: Ident, bucket: Any, address: int) -> bool:
        return self._to_the_end(partial(self._ranks.reduce, ident, bucket, address))

    def gather(self, ident: Ident, bucket: Any) -> bool:
        return self._to_the_end(partial(self._ranks.gather, ident, bucket))

    def _to_the_end(self, advance: Callable[[int, float], tuple[int, int, int]]) -> bool:
        published, state = 0, NOT_YET
        for _ in range(int(PATIENCE_S / 0.05)):
            state, _, published = advance(published, 0.05)
            if state != NOT_YET:
                return state != PASSED
        raise TimeoutError("another thread has not come")

    def leave(self) -> None:
        """Leave nothing."""

    def close(self) -> None:
        """Hold nothing."""


class Ranks:
    """An exchange for each rank of a layout."""

    def __init__(self, layout: Layout, *, flat: bool = False, dtype: torch.dtype | None = None) -> None:
        """``dtype``: what fp32 gradients are rounded to between hosts."""
        (hosts, count), world_size = layout, layout[0] * layout[1]
        reductions, gathers = UnderWayMessages(), UnderWayMessages()
        self.messages = [Messages(rank, world_size, reductions) for rank in range(world_size)]
        self.exchanges: list[Exchange] = []
        self._arenas = [torch.zeros(count, DATA_AT + 2 * slot_bytes(count), dtype=torch.uint8) for _ in range(hosts)]
        for rank, messages in enumerate(self.messages):
            pool = StagingPool()
            others = [peer for peer in range(world_size) if peer // count != rank // count]
            rounded = {} if dtype is None else dict.fromkeys(others, dtype)
            pairwise = PairwiseExchange(messages, Messages(rank, world_size, gathers), pool, rounded)
            if flat:
                self.exchanges.append(pairwise)
                continue
            memory = Memory(rank % count, list(self._arenas[rank // count]), int(hosts > 1))
            if hosts > 1:
                self.exchanges.append(HierarchicalExchange(memory, pairwise, count, pool))
            else:
                self.exchanges.append(HostExchange(memory, pairwise, pool))  # type: ignore[arg-type]

    def at_once(self, call: Callable[[int, Exchange], Any]) -> list[Any]:
        """What the call returns on each rank."""
        with ThreadPoolExecutor(len(self.exchanges)) as pool:
            return list(pool.map(call, range(len(self.exchanges)), self.exchanges))


def runs_of(rank: int, seed: int, dtype: torch.dtype, *, add: bool = False) -> list[Run]:
    """Gradients of a rank, of very different sizes, one of which some ranks lack."""
    generator, runs, start = torch.Generator().manual_seed(100 * seed + rank), [], 0
    for position, numel in enumerate(NUMELS):
        values = (torch.randn(numel, generator=generator) * 10.0 ** (rank % 5 - 2)).to(dtype)
        runs.append(Run(start, numel, None if position == 3 and rank % 3 == 1 else values, add and position % 2 == 0))
        start += numel + GAP
    return runs


def bounds_of(world_size: int) -> list[int]:
    """Uneven shards, one of them empty."""
    inner = [TOTAL * rank // world_size + rank % 3 for rank in range(2, world_size)]
    return [0, 0, *inner, TOTAL]


def covered(shard: Tensor, first: int) -> list[Tensor]:
    """The elements of a shard that runs cover."""
    ends = list(itertools.accumulate((numel + GAP for numel in NUMELS), initial=0))
    spans = [(max(start - first, 0), start + n - first) for start, n in zip(ends, NUMELS, strict=False)]
    return [shard[low:high] for low, high in spans if high > low]


def in_full(runs: Sequence[Run], dtype: torch.dtype = torch.float32) -> Tensor:
    """A bucket in one tensor, with zeros between the runs."""
    full = torch.zeros(TOTAL, dtype=dtype)
    for run in runs:
        if run.values is not None:
            full[run.start : run.start + run.numel] = run.values
    return full


def reduced(rank: int, exchange: Exchange, world_size: int, dtype: torch.dtype) -> list[Tensor]:
    bounds, outs = bounds_of(world_size), []
    for seed in range(3):
        out = torch.full((bounds[rank + 1] - bounds[rank],), 0.5, dtype=dtype)
        runs = runs_of(rank, seed, dtype, add=seed == 2)
        assert exchange.reduce_runs(BucketReduction(Ident(1, 0, seed), runs, bounds, out))
        outs += covered(out, bounds[rank])
    return outs


def expected(rank: int, world_size: int, means: Sequence[Tensor]) -> list[Tensor]:
    """What :func:`reduced` returns, given the mean of each bucket."""
    bounds, outs = bounds_of(world_size), []
    for seed, mean in enumerate(means):
        before = torch.zeros_like(mean)
        for run in runs_of(rank, seed, mean.dtype, add=seed == 2):
            before[run.start : run.start + run.numel] = 0.5 if run.add else 0.0
        outs += covered((before + mean)[bounds[rank] : bounds[rank + 1]], bounds[rank])
    return outs


def assert_reduced(ranks: Ranks, world_size: int, dtype: torch.dtype, means: Callable[[int], Sequence[Tensor]]) -> None:
    """Reduce, and compare with the means that each rank should have."""
    call = partial(reduced, world_size=world_size, dtype=dtype)
    for rank, ours in enumerate(ranks.at_once(call)):
        theirs = expected(rank, world_size, means(rank))
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def tree_mean(world_size: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The definition: the tree's sum, one division, in fp32 for what is narrower."""
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    buckets = [in_full(runs_of(rank, seed, dtype), dtype).to(wide) for rank in range(world_size)]
    return (tree_sum(buckets) / world_size).to(dtype)


def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut buckets after each 64 elements of a shard."""
    cut, smallest = pieces._cut, Flow(piece_bytes=0)
    monkeypatch.setattr(pieces, "_cut", lambda bounds, itemsize, _: cut(bounds, itemsize, smallest))
    monkeypatch.setattr(pieces, "_LEAST_MESSAGE_BYTES", 256)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_bits_are_the_trees_in_every_layout(
    world_size: int, dtype: torch.dtype, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut:
        in_small_pieces(monkeypatch)
    means = [tree_mean(world_size, seed, dtype) for seed in range(3)]
    assert_reduced(Ranks((world_size, 1), flat=True), world_size, dtype, lambda _: means)
    counts = [count for count in (2, 4, 8) if count < world_size and world_size % count == 0]
    if not dtype.is_complex:  # on one host, messages carry those
        counts.append(world_size)
    for count in counts:
        assert_reduced(Ranks((world_size // count, count)), world_size, dtype, lambda _: means)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gathered_shards_are_those_of_their_owners(
    layout: Layout, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairwise_exchange, "_LEAST_BYTES", 64)
    world_size = layout[0] * layout[1]
    bounds = bounds_of(world_size)

    def gathered(rank: int, exchange: Exchange) -> list[Tensor]:
        buckets = [
            ParamRuns(run._replace(tensor=torch.full((run.numel,), rank, dtype=dtype)) for run in runs_of(0, 0, dtype))
            for _ in range(3)
        ]
        finishes = [exchange.gather_runs(Ident(1, 5, turn), runs, bounds) for turn, runs in enumerate(buckets[:2])]
        finishes[0]()
        finishes.append(exchange.gather_runs(Ident(1, 5, 2), buckets[2], bounds))
        finishes[1]()
        finishes[2]()
        return [run.tensor for runs in buckets for run in runs if run.tensor is not None]

    owners = torch.cat([torch.full((high - low,), rank) for rank, (low, high) in enumerate(itertools.pairwise(bounds))])
    starts = [run.start for run in runs_of(0, 0, dtype)] * 3
    for tensors in Ranks(layout).at_once(gathered):
        for start, tensor in zip(starts, tensors, strict=True):
            assert torch.equal(tensor, owners[start : start + tensor.numel()].to(dtype))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_element_leaves_a_host_once_for_each_other_host(layout: Layout, dtype: torch.dtype | None) -> None:
    (hosts, count), ranks, numel = layout, Ranks(layout, dtype=dtype), 64 * layout[0] * layout[1] * 100
    bounds = range(0, numel + 1, numel // (hosts * count))

    def reduce(rank: int, exchange: Exchange) -> bool:
        out = torch.zeros(bounds[1])
        return exchange.reduce_runs(BucketReduction(Ident(0, 0, 0), [Run(0, numel, torch.ones(numel))], bounds, out))

    assert all(ranks.at_once(reduce))
    for host in range(hosts):
        sent = sum(sum(messages.sent_nbytes.values()) for messages in ranks.messages[host * count : (host + 1) * count])
        assert sent <= 1.02 * (4 if dtype is None else dtype.itemsize) * numel * (hosts - 1) / hosts
    assert all(peer % count == rank % count for rank, m in enumerate(ranks.messages) for peer in m.sent_nbytes)


def rounded_mean(layout: Layout, seed: int, host: int, *, flat: bool) -> Tensor:
    """The mean as a host has it: what other hosts have added up, or their ranks have if they add nothing up, is rounded
    to bf16.
    """
    (hosts, count), means = layout, []
    buckets = [in_full(runs_of(rank, seed, torch.float32)) for rank in range(hosts * count)]
    for other in range(hosts):
        of_host = buckets[other * count : (other + 1) * count]
        parts = of_host if flat else [tree_sum(of_host)]
        means += parts if other == host else [part.bfloat16().float() for part in parts]
    return tree_sum(means) / (hosts * count)


@pytest.mark.parametrize(
    ("layout", "flat"),
    [*((layout, False) for layout in LAYOUTS), *((layout, True) for layout in [(2, 1), (3, 1), *LAYOUTS])],
    ids=lambda value: {False: "in two stages", True: "flat"}.get(value, str(value)),
)
def test_what_leaves_a_host_is_rounded_once(layout: Layout, flat: bool) -> None:
    world_size, ranks = layout[0] * layout[1], Ranks(layout, flat=flat, dtype=torch.bfloat16)

    def means(rank: int) -> list[Tensor]:
        return [rounded_mean(layout, seed, rank // layout[1], flat=flat) for seed in range(3)]

    assert_reduced(ranks, world_size, torch.float32, means)


@pytest.mark.parametrize("layout", [(2, 2), (3, 2)], ids=str)
def test_the_error_of_rounding_is_within_its_bound(layout: Layout) -> None:
    """See docs/reference.md; fp32's own rounding, of each sum and the division, is far below the slack."""
    (hosts, count), world_size = layout, layout[0] * layout[1]
    for seed in range(20):
        buckets = [in_full(runs_of(rank, seed, torch.float32)).double() for rank in range(world_size)]
        sums = [sum(buckets[host * count : (host + 1) * count], torch.zeros(TOTAL)) for host in range(hosts)]
        for host in range(hosts):
            others = [of_host.abs() for other, of_host in enumerate(sums) if other != host]
            slack = world_size * 2.0**-22 * torch.stack([bucket.abs() for bucket in buckets]).sum(0)
            bound = (2.0**-8 * torch.stack(others).sum(0) + slack) / world_size
            off = (rounded_mean(layout, seed, host, flat=False) - torch.stack(sums).sum(0) / world_size).abs()
            assert (off <= bound).all() and (off > bound / 50).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_gradients_that_are_not_fp32_are_not_rounded(dtype: torch.dtype) -> None:
    means = [tree_mean(4, seed, dtype) for seed in range(3)]
    assert_reduced(Ranks((2, 2), dtype=torch.bfloat16), 4, dtype, lambda _: means)


# Which exchanges each rank skips: one rank, ranks of two hosts at different places, all of a host.
SKIPPED: list[dict[int, set[int]]] = [
    {1: {1}},
    {0: {1}, 3: {1}},
    {1: {1, 2}, 2: {2, 3}},
    {0: {2}, 1: {2}},
    {0: {0, 1, 2}},
]


def reduce_all(exchange: Exchange, reductions: Sequence[BucketReduction], pace: random.Random | None) -> list[bool]:
    """Reduce buckets, several of which are under way at a time; ``None``: one after the other."""
    if pace is None:
        return [exchange.reduce_runs(reduction) for reduction in reductions]
    under_way, futures, first = UnderWay(), [Future[bool]() for _ in reductions], 0
    for number, (reduction, future) in enumerate(zip(reductions, futures, strict=True)):
        if not exchange.has_lanes(reduction.out.dtype):
            under_way.end_all()
            future.set_result(exchange.reduce_runs(reduction))
        else:
            count = pieces.count_pieces(reduction.bounds, reduction.out.element_size(), reduction.flow)
            stages = exchange.reduce_in_stages(reduction._replace(lane=first))
            under_way.begin(
                Lane(pieces.REDUCTION, pieces.lane_of(number, first, count, reduction.flow)), stages, future
            )
            first += count
        for _ in range(pace.randrange(4)):  # as if the next bucket were not complete yet
            if under_way:
                under_way.advance()
    under_way.end_all()
    return [future.result(0) for future in futures]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("paced", [False, True], ids=["one at a time", "several under way"])
@pytest.mark.parametrize(
    ("mixed", "rounded"), [(False, None), (True, None), (True, torch.bfloat16)], ids=["fp32", "mixed", "rounded"]
)
@pytest.mark.parametrize(("layout", "flat"), [*((layout, False) for layout in LAYOUTS), ((3, 1), True)], ids=str)
@pytest.mark.parametrize("skipped", [{}, *SKIPPED], ids=str)
def test_an_exchange_that_a_rank_skips_is_void_on_all(
    skipped: dict[int, set[int]],
    layout: Layout,
    flat: bool,
    mixed: bool,
    rounded: torch.dtype | None,
    paced: bool,
    cut: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cut:
        in_small_pieces(monkeypatch)
    world_size = layout[0] * layout[1]
    bounds = bounds_of(world_size)
    void = set().union(*(numbers for rank, numbers in skipped.items() if rank < world_size))
    dtypes = [torch.bfloat16 if mixed and number % 3 == 2 else torch.float32 for number in range(9)]
    means = [tree_mean(world_size, number, dtype) for number, dtype in enumerate(dtypes)]

    def train(rank: int, exchange: Exchange) -> list[int]:
        reductions = []
        for number, dtype in enumerate(dtypes):
            if number not in skipped.get(rank, ()):
                out = torch.zeros(bounds[rank + 1] - bounds[rank], dtype=dtype)
                reductions.append(BucketReduction(Ident(0, 0, number), runs_of(rank, number, dtype), bounds, out))
        complete = []
        done = reduce_all(exchange, reductions, random.Random(rank) if paced else None)
        for whole, (ident, _, _, out, *_) in zip(done, reductions, strict=True):
            if whole:
                complete.append(ident.sequence)
                mean = means[ident.sequence][bounds[rank] : bounds[rank + 1]]
                pairs = zip(covered(out, bounds[rank]), covered(mean, bounds[rank]), strict=True)
                assert rounded or all(torch.equal(ours, theirs) for ours, theirs in pairs)
        return complete

    for complete in Ranks(layout, flat=flat, dtype=rounded).at_once(train):
        assert complete == [number for number in range(9) if number not in void]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aaaa", 4),
        ("aabb", 2),
        ("aaaabbbb", 4),
        ("aabbcc", 2),
        ("abab", 1),
        ("aaab", 1),
        ("abcd", 1),
        ("aabbaa", 1),
        ("aaabbb", 1),
        ("aab", 1),
        ("aabc", 1),
        ("abcc", 1),
        ("aaaabbcc", 1),
        ("aabbbbcc", 1),
        ("aaaaaabb", 1),
        ("aabbbbbb", 1),
        ("aabbbbaa", 1),
        ("aaaabbbbcccc", 4),
    ],
)
def test_ranks_add_up_first_on_hosts_that_are_equal_aligned_blocks(hosts: str, expected: int) -> None:
    assert ranks_per_host(list(hosts)) == expected


def test_a_host_without_a_name_may_be_any_host() -> None:
    assert ranks_per_host(["", "a"]) == 2
    assert ranks_per_host(["a", "a", "b", ""]) == 1
    assert ranks_per_host(["a", "", "b", "b"]) == 1
