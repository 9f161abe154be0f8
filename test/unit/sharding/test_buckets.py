"""A bucket: filling, staging, and this rank's shard of the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from test.support.harness import run_threads
from zero_opt import Overlapped, ShardedOptimizer
from zero_opt.comm.exchange import Ident, StagedExchange, StagingPool, mean_in_tree_order
from zero_opt.layout import BucketLayout, plan_flat, plan_whole_params
from zero_opt.sharding.buckets import Fill, GradBucket
from zero_opt.sharding.flat_param import FlatParam

IDENT = Ident(3, 1, 4)
WORLD_SIZE = 2


class TwinExchange(StagedExchange):
    """A world of two: ``peer`` is what the other rank has staged; None has it skip the exchange."""

    def __init__(self, pool: StagingPool, rank: int = 0) -> None:
        super().__init__(rank, pool)
        self.pool, self.rank = pool, rank
        self.peer: Tensor | None = None
        self.seen: list[tuple[Ident, Tensor]] = []
        self.out: Tensor | None = None

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:
        self.seen.append((ident, bucket.clone()))
        self.out = out
        assert out.dtype is bucket.dtype
        if self.peer is None:
            out.fill_(torch.nan)
            return False
        run = slice(bounds[self.rank], bounds[self.rank + 1])
        parts = [bucket[run], self.peer[run]]
        mean_in_tree_order(parts if self.rank == 0 else parts[::-1], out)
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Callable[[], None]:
        raise NotImplementedError


def params() -> list[Parameter]:
    """A matrix in another order of dimensions, a 0-dim, an empty and an oddly sized one."""
    return [
        Parameter(torch.zeros(5, 40).t()),
        Parameter(torch.zeros(())),
        Parameter(torch.zeros(0, 3)),
        Parameter(torch.zeros(77)),
    ]


def bucket_of(
    members: list[Parameter], rank: int = 0, whole: bool = False, reduce_dtype: torch.dtype | None = None
) -> GradBucket:
    flats = {i: FlatParam(p, f"p{i}") for i, p in enumerate(members)}
    specs = {i: flat.spec(0) for i, flat in flats.items()}
    planner = plan_whole_params if whole else plan_flat
    layout: BucketLayout
    (layout,) = planner(specs, WORLD_SIZE, 2**20)
    return GradBucket(layout, [flats[i] for i in layout.params], rank, reduce_dtype)


def grads_like(bucket: GradBucket, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(flat.param.shape, generator=generator) for flat in bucket.params]


def sealed(bucket: GradBucket, grads: Sequence[Tensor | None]) -> Fill:
    fill = bucket.fill()
    for position, grad in enumerate(grads):
        if grad is not None:
            fill.put(position, grad)
    bucket.seal(fill)
    return fill


def staged(bucket: GradBucket, grads: Sequence[Tensor]) -> Tensor:
    """What another rank would stage, in the test's own words."""
    buffer = torch.zeros(bucket.layout.numel)
    for flat, offset, grad in zip(bucket.params, bucket.layout.offsets, grads, strict=True):
        buffer[offset : offset + grad.numel()] = flat.flatten(grad)
    return buffer


def reduced(bucket: GradBucket) -> dict[int, Tensor]:
    """This rank's slices of the shard, by parameter."""
    return {piece.param: view.clone() for piece, view in zip(bucket.slices, bucket.slice_grads(), strict=True)}


def expected(bucket: GradBucket, means: Sequence[Tensor]) -> dict[int, Tensor]:
    """The same, cut out of full-shape means."""
    found = {}
    for piece in bucket.slices:
        position = bucket.layout.params.index(piece.param)
        whole = piece.in_param.numel == means[position].numel()
        run = bucket.params[position].flatten(means[position])[slice(*piece.in_param)]
        found[piece.param] = means[position] if whole else run
    return found


def assert_same(one: dict[int, Tensor], other: dict[int, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_fill_is_complete_when_every_trainable_param_has_delivered() -> None:
    members = params()
    members[3].requires_grad_(False)
    bucket = bucket_of(members)
    fill = bucket.fill()
    assert not fill.sealed
    for position, flat in enumerate(bucket.params):
        if flat.param.requires_grad:
            assert not fill.complete
            fill.put(position, torch.zeros_like(flat.param))
    assert fill.complete
    bucket.seal(fill)
    assert fill.sealed


def test_a_bucket_with_nothing_trainable_is_complete_at_once() -> None:
    members = [p.requires_grad_(False) for p in params()]
    assert bucket_of(members).fill().complete


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("whole", [False, True])
def test_the_shard_is_the_mean_of_this_ranks_slices(rank: int, whole: bool) -> None:
    bucket = bucket_of(params(), rank, whole)
    exchange = TwinExchange(StagingPool(), rank)
    mine, theirs = grads_like(bucket, 1), grads_like(bucket, 2)
    exchange.peer = staged(bucket, theirs)
    assert bucket.reduce(sealed(bucket, mine), IDENT, [False] * len(bucket.slices), exchange, exchange.pool)
    (ident, sent) = exchange.seen[0]
    assert ident == IDENT
    for offset, flat, grad in zip(bucket.layout.offsets, bucket.params, mine, strict=True):
        assert torch.equal(sent[offset : offset + grad.numel()], flat.flatten(grad))
    ordered = (mine, theirs) if rank == 0 else (theirs, mine)
    assert_same(reduced(bucket), expected(bucket, [(a + b) / 2 for a, b in zip(*ordered)]))


def test_a_first_reduction_goes_straight_into_the_shard() -> None:
    bucket = bucket_of(params())
    exchange = TwinExchange(StagingPool())
    exchange.peer = staged(bucket, grads_like(bucket, 2))
    bucket.reduce(sealed(bucket, grads_like(bucket, 1)), IDENT, [False] * len(bucket.slices), exchange, exchange.pool)
    assert exchange.out is bucket.shard


def test_missing_gradients_are_zeros_whatever_staging_held() -> None:
    bucket = bucket_of(params())
    exchange = TwinExchange(StagingPool())
    exchange.pool.buffer(0, bucket.layout.numel, torch.float32, bucket.device).fill_(torch.nan)
    grads = grads_like(bucket, 1)
    exchange.peer = staged(bucket, [torch.zeros_like(g) for g in grads])
    some: list[Tensor | None] = [grads[0], *[None] * (len(grads) - 1)]
    bucket.reduce(sealed(bucket, some), IDENT, [False] * len(bucket.slices), exchange, exchange.pool)
    means = [g / 2 if at == 0 else torch.zeros_like(g) for at, g in enumerate(grads)]
    assert_same(reduced(bucket), expected(bucket, means))


def test_rounds_are_added_per_slice() -> None:
    bucket = bucket_of(params())
    exchange = TwinExchange(StagingPool())
    rounds = []
    for seed, add_first in ((1, False), (3, True)):
        mine, theirs = grads_like(bucket, seed), grads_like(bucket, seed + 1)
        exchange.peer = staged(bucket, theirs)
        accumulate = [add_first and number == 0 for number in range(len(bucket.slices))]
        bucket.reduce(sealed(bucket, mine), IDENT, accumulate, exchange, exchange.pool)
        rounds.append(expected(bucket, [(a + b) / 2 for a, b in zip(mine, theirs)]))
    first = bucket.slices[0].param
    assert_same(reduced(bucket), {**rounds[1], first: rounds[0][first] + rounds[1][first]})


def test_a_skipped_exchange_adds_nothing() -> None:
    bucket = bucket_of(params())
    exchange = TwinExchange(StagingPool())
    exchange.peer = staged(bucket, grads_like(bucket, 2))
    bucket.reduce(sealed(bucket, grads_like(bucket, 1)), IDENT, [False] * len(bucket.slices), exchange, exchange.pool)
    before = reduced(bucket)
    exchange.peer = None
    add = [True] * len(bucket.slices)
    assert not bucket.reduce(sealed(bucket, grads_like(bucket, 1)), IDENT, add, exchange, exchange.pool)
    assert_same(reduced(bucket), before)


def test_gradients_are_let_go_once_they_are_staged() -> None:
    bucket = bucket_of(params())
    exchange = TwinExchange(StagingPool())
    fill = sealed(bucket, grads_like(bucket, 1))
    bucket.reduce(fill, IDENT, [False] * len(bucket.slices), exchange, exchange.pool)
    assert fill.grads == []


def test_gradients_travel_and_are_kept_in_the_reduce_dtype() -> None:
    bucket = bucket_of(params(), reduce_dtype=torch.float64)
    exchange = TwinExchange(StagingPool())
    mine, theirs = grads_like(bucket, 1), grads_like(bucket, 2)
    exchange.peer = staged(bucket, theirs).double()
    bucket.reduce(sealed(bucket, mine), IDENT, [False] * len(bucket.slices), exchange, exchange.pool)
    assert bucket.shard.dtype is torch.float64
    means = [(a.double() + b.double()) / 2 for a, b in zip(mine, theirs)]
    assert_same(reduced(bucket), expected(bucket, means))


def test_the_shard_takes_memory_when_first_needed_and_is_kept() -> None:
    bucket = bucket_of(params())
    assert bucket.shard_nbytes == 0
    first = bucket.shard
    assert bucket.shard is first
    assert bucket.shard_nbytes == 4 * bucket.layout.shard(0).numel


def test_slice_grads_are_live_views() -> None:
    bucket = bucket_of(params(), whole=True)
    for view in bucket.slice_grads():
        view.fill_(2)
    assert all(bool((view == 2).all()) for view in bucket.slice_grads())
    assert all(
        view.shape == bucket.params[bucket.layout.params.index(piece.param)].param.shape
        for view, piece in zip(bucket.slice_grads(), bucket.slices, strict=True)
    )


def storages(views: Iterable[Tensor]) -> set[int]:
    """Addresses of the memory that tensors are views of."""
    return {view.untyped_storage().data_ptr() for view in views}


def uses(tensor: Tensor) -> int:
    """How many tensors refer to the memory of a tensor, and what reads that."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return count


def test_buckets_of_growing_size_keep_one_staging_buffer_alive() -> None:
    """Of gradients in another dtype, which no exchange can read where they are."""
    exchange = TwinExchange(StagingPool())
    buckets = [bucket_of([Parameter(torch.zeros(128 * (i + 1)))]) for i in range(6)]
    for bucket in buckets:
        bucket.reserve_staging(exchange.pool)
    for bucket in [*buckets, *buckets]:
        grads = [grad.double() for grad in grads_like(bucket, 1)]
        exchange.peer = staged(bucket, grads)
        bucket.reduce(sealed(bucket, grads), IDENT, [False], exchange, exchange.pool)
    [buffer] = exchange.pool._buffers.values()
    assert exchange.pool.nbytes == 4 * 128 * 6
    exchange.pool.release()
    assert uses(buffer) == uses(torch.zeros(1))  # no bucket keeps a view


def test_an_optimizer_keeps_two_staging_buffers_however_its_buckets_grow() -> None:
    def train(rank: int, world_size: int) -> list[tuple[int, int]]:
        members = [Parameter(torch.ones(128 * (6 - i))) for i in range(6)]
        optimizer = ShardedOptimizer(members, torch.optim.SGD, lr=0.1, reduction=Overlapped(bucket_mb=1e-6))
        found = []
        for larger in (None, 4096, None):
            if larger is not None:
                members.append(Parameter(torch.ones(larger)))
                optimizer.add_param_group({"params": members[-1:]})
            for _ in range(2):
                sum((p * (rank + 1)).sum() for p in members).backward()  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
            sharded = optimizer._engine
            kept = [views for kept in sharded.gather._arrivals.values() for views in kept.runs.cache.values()]
            alive = storages(view for parts in kept for _, places in parts for view in places)
            found.append((len(alive), sharded.parts.pool.nbytes))
        optimizer.close()
        return found

    for found in run_threads(2, train):
        assert found == [(2, 2 * 4 * 128 * 6), (2, 2 * 4 * 4096), (2, 2 * 4 * 4096)]
