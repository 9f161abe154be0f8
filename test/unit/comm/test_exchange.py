"""What all exchanges share: sums in tree order, buffers that are used again, names in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from test.support.scenario import mean
from zero_opt.comm.exchange import (
    BucketReduction,
    Ident,
    ParamRuns,
    Run,
    StagedExchange,
    StagingPool,
    add_mean,
    chunks_of,
    in_tree_order,
    mean_in_tree_order,
)

CPU = torch.device("cpu")


def rank_values(world_size: int, dtype: torch.dtype, seed: int, numel: int = 257) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = [10.0 ** (rank % 5 - 2) for rank in range(world_size)]
    return [(torch.randn(numel, generator=generator) * s).to(dtype) for s in scale]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 7, 8, 13])
def test_the_mean_is_summed_in_tree_order(world_size: int, dtype: torch.dtype) -> None:
    parts = rank_values(world_size, dtype, seed=world_size)
    out = torch.full_like(parts[0], 99)
    mean_in_tree_order(parts, out)
    assert torch.equal(out, mean(parts))


def test_order_matters_in_this_test_at_all() -> None:
    parts = rank_values(5, torch.float32, seed=1)
    orders = {tuple(mean([parts[i] for i in order]).tolist()) for order in itertools.permutations(range(5))}
    assert len(orders) > 1


def test_the_order_of_two_and_three_is_that_of_the_ranks_and_of_six_is_a_tree() -> None:
    names = [str(rank) for rank in range(7)]

    def written(count: int) -> str:
        return in_tree_order(names[:count], lambda first, second: f"({first}+{second})")

    assert written(1) == "0"
    assert written(2) == "(0+1)"
    assert written(3) == "((0+1)+2)"
    assert written(4) == "((0+1)+(2+3))"
    assert written(6) == "(((0+1)+(2+3))+(4+5))"
    assert written(7) == "(((0+1)+(2+3))+((4+5)+6))"


@given(st.integers(1, 200), st.data())
def test_an_aligned_block_of_ranks_can_be_added_up_first(world_size: int, data: st.DataObject) -> None:
    """As by the ranks of one host, which then send their sum as one part."""

    def add(first: str, second: str) -> str:
        return f"({first}+{second})"

    names = [str(rank) for rank in range(world_size)]
    size = 2 ** data.draw(st.integers(0, world_size.bit_length() - 1))
    blocks = [in_tree_order(names[start : start + size], add) for start in range(0, world_size, size)]
    assert in_tree_order(blocks, add) == in_tree_order(names, add)


def test_half_precision_is_accumulated_in_fp32_and_rounded_once() -> None:
    """In bf16 each 1 would be lost beside 256; in fp32 they add up."""
    parts = [torch.tensor([256.0]), *[torch.tensor([1.0])] * 7]
    out = torch.empty(1, dtype=torch.bfloat16)
    mean_in_tree_order([part.bfloat16() for part in parts], out)
    assert out.item() == torch.tensor(263 / 8).bfloat16().item() != 256 / 8


def test_fp16_sums_beyond_its_range_still_have_a_mean() -> None:
    out = torch.empty(3, dtype=torch.float16)
    mean_in_tree_order([torch.full((3,), 60000.0, dtype=torch.float16)] * 4, out)
    assert out.tolist() == [60000.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_a_mean_may_be_written_over_one_of_its_parts(world_size: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(3001).to(dtype) for _ in range(world_size)]
    expected = torch.empty_like(parts[0])
    mean_in_tree_order(parts, expected)
    for rank in range(world_size):
        given = [part.clone() for part in parts]
        add_mean(given, given[rank], add=False)
        assert torch.equal(given[rank], expected)


def test_parts_are_left_as_they_are() -> None:
    parts = rank_values(3, torch.float32, 0)
    before = [part.clone() for part in parts]
    mean_in_tree_order(parts, torch.empty_like(parts[0]))
    assert all(torch.equal(a, b) for a, b in zip(parts, before))


def test_idents_order_as_exchanges_follow_each_other() -> None:
    order = [Ident(0, 0, 0), Ident(0, 0, 5), Ident(0, 1, 0), Ident(1, 0, 0), Ident(1, 0, 1), Ident(2, 0, 0)]
    assert sorted(order, reverse=True)[::-1] == order


@pytest.mark.parametrize("bounds", [range(0, 13, 4), (0, 0, 4, 12), (0, 12)])
def test_chunks_are_views_in_rank_order(bounds: range | tuple[int, ...]) -> None:
    bucket = torch.arange(12)
    chunks = chunks_of(bucket, bounds)
    assert torch.equal(torch.cat(chunks), bucket)
    assert [chunk.numel() for chunk in chunks] == [b - a for a, b in itertools.pairwise(bounds)]
    assert chunks[-1].data_ptr() == bucket[bounds[-2] :].data_ptr()


# -- the adapter for exchanges that need a bucket in one tensor -------------------------------------------------------


class Mirror(StagedExchange):
    """Rank 1 of three whose peers hold what it holds: a mean is its own values, and so is what arrives."""

    gathers_ahead = 1

    def __init__(self, *, skipped: bool = False) -> None:
        super().__init__(1, StagingPool())
        self.skipped, self.buckets, self.ended = skipped, list[Tensor](), 0

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:
        self.buckets.append(bucket)
        out.copy_(bucket[bounds[1] : bounds[2]])
        return not self.skipped

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Callable[[], None]:
        self.buckets.append(bucket)
        own = bucket[bounds[1] : bounds[2]]

        def end() -> None:
            self.ended += 1
            for chunk in (bucket[: bounds[1]], bucket[bounds[2] :]):
                chunk.copy_(own[: chunk.numel()])

        return end


BOUNDS = (0, 8, 16, 24)


def values(start: int, numel: int) -> Tensor:
    return torch.arange(start, start + numel, dtype=torch.float32) + 1


def test_a_bucket_in_one_run_is_exchanged_where_it_is() -> None:
    exchange, bucket, out = Mirror(), values(0, 24), torch.zeros(8)
    assert exchange.reduce_runs(BucketReduction(Ident(0, 0, 0), [Run(0, 24, bucket)], BOUNDS, out))
    assert exchange.buckets[0] is bucket
    assert torch.equal(out, values(8, 8))
    assert exchange._pool.nbytes == 0


def test_runs_are_put_together_with_zeros_where_there_are_no_values() -> None:
    exchange, out = Mirror(), torch.zeros(8)
    exchange._pool.buffer(0, 24, torch.float32, CPU).fill_(torch.nan)
    runs = [Run(0, 6, values(0, 6)), Run(6, 4, None), Run(10, 14, values(10, 14))]
    assert exchange.reduce_runs(BucketReduction(Ident(0, 0, 0), runs, BOUNDS, out))
    assert out.tolist() == [0, 0, *values(10, 6).tolist()]
    assert torch.equal(exchange.buckets[0][:6], values(0, 6))


def test_means_are_added_only_where_the_runs_say_so() -> None:
    out = torch.full((8,), 100.0)
    runs = [Run(0, 12, values(0, 12), add=True), Run(12, 12, values(12, 12))]
    assert Mirror().reduce_runs(BucketReduction(Ident(0, 0, 0), runs, BOUNDS, out))
    assert torch.equal(out, torch.cat([values(8, 4) + 100, values(12, 4)]))


def test_a_skipped_exchange_leaves_what_means_are_added_to() -> None:
    out = torch.full((8,), 100.0)
    runs = [Run(0, 24, values(0, 24), add=True)]
    assert not Mirror(skipped=True).reduce_runs(BucketReduction(Ident(0, 0, 0), runs, BOUNDS, out))
    assert torch.equal(out, torch.full((8,), 100.0))


def test_a_gather_writes_the_other_ranks_shards_once_it_ends() -> None:
    exchange, first, second = Mirror(), values(0, 10), values(10, 14)
    runs = ParamRuns([Run(0, 10, first), Run(10, 14, second)])
    end = exchange.gather_runs(Ident(0, 0, 0), runs, BOUNDS)
    assert torch.equal(torch.cat([first, second]), values(0, 24))
    end()
    assert torch.equal(torch.cat([first, second]), values(8, 8).repeat(3))
    assert exchange.ended == 1


def test_gathers_that_overlap_have_a_buffer_each_and_views_are_made_once() -> None:
    exchange, runs = Mirror(), ParamRuns([Run(0, 24, values(0, 24))])
    for turn in range(4):
        exchange.gather_runs(Ident(0, 0, turn), runs, BOUNDS)()
    places = [bucket.data_ptr() for bucket in exchange.buckets]
    assert places[:2] == places[2:]
    assert places[0] != places[1]
    assert len(runs.cache) == 2


# -- the pool of buffers ----------------------------------------------------------------------------------------------


def test_a_buffer_is_used_again() -> None:
    pool = StagingPool()
    first = pool.buffer(0, 100, torch.float32, CPU)
    assert first.shape == (100,)
    assert not first.count_nonzero()
    assert pool.buffer(0, 40, torch.float32, CPU).data_ptr() == first.data_ptr()
    assert pool.buffer(0, 40, torch.float32, CPU).shape == (40,)
    assert pool.nbytes == 400


@pytest.mark.parametrize("other", [(1, torch.float32), (0, torch.bfloat16)])
def test_uses_and_dtypes_do_not_share(other: tuple[int, torch.dtype]) -> None:
    pool = StagingPool()
    one = pool.buffer(0, 8, torch.float32, CPU)
    two = pool.buffer(other[0], 8, other[1], CPU)
    two.fill_(1)
    assert not one.count_nonzero()
    assert pool.nbytes == 32 + 8 * other[1].itemsize


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_the_pool_holds_the_largest_asked_for_and_no_more(sizes: list[int]) -> None:
    pool = StagingPool()
    for size in sizes:
        assert pool.buffer(0, size, torch.float64, CPU).shape == (size,)
    assert pool.nbytes == 8 * max(sizes)


def test_staging_has_room_for_what_was_reserved_from_the_start() -> None:
    pool = StagingPool()
    pool.reserve(100, torch.float32, CPU)
    small = pool.staging(0, 10, torch.float32, CPU)
    assert small.shape == (10,)
    assert pool.nbytes == 400
    assert pool.staging(0, 100, torch.float32, CPU).data_ptr() == small.data_ptr()
    assert pool.buffer(1, 10, torch.float32, CPU).shape == (10,)
    assert pool.nbytes == 440


def test_reserving_more_gives_up_what_is_too_small() -> None:
    pool = StagingPool()
    kept = pool.buffer(0, 8, torch.float64, CPU)
    pool.buffer(0, 8, torch.float32, CPU)
    pool.reserve(50, torch.float32, CPU)
    assert pool.nbytes == 64
    pool.reserve(20, torch.float32, CPU)
    assert pool.staging(0, 30, torch.float32, CPU).shape == (30,)
    assert pool.nbytes == 64 + 200
    assert pool.buffer(0, 8, torch.float64, CPU).data_ptr() == kept.data_ptr()
