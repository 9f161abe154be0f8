"""Buckets leave while backward runs, and how large they are changes no bit."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from zero_opt.sharding.buckets import GradBucket

WIDTH, DEPTH = 96, 8
SIZES_MB = (0.1, 1, 25, 1000)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
    return nn.Sequential(nn.Embedding(4096, WIDTH), *blocks, nn.Linear(WIDTH, 16))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """As for a GPT: matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
    ]


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens = torch.randint(4096, (4, 8), generator=torch.Generator().manual_seed(10 * step + rank))
    return torch.square(model(tokens)).mean()  # type: ignore[no-any-return]


def _train(rank: int, world_size: int, kind: str, exchange: str) -> list[list[Tensor]]:
    """The parameters after training with each size of buckets."""
    results = []
    for bucket_mb in SIZES_MB:
        model = _model()
        policy = getattr(zero_opt, kind)(bucket_mb, exchange=exchange)
        optimizer = zero_opt.ShardedOptimizer(_groups(model), torch.optim.AdamW, lr=0.01, reduction=policy)
        for step in range(4):
            _loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        results.append([param.detach() for param in model.parameters()])
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_size_of_buckets_changes_no_bit(world_size: int) -> None:
    expected = run_processes(world_size, _train, "AtStep", "backend")[0][0]
    for kind in ("Overlapped", "AtStep"):
        for exchange in ("auto", "backend"):
            for results in run_processes(world_size, _train, kind, exchange):
                for params in results:
                    assert_bitwise(params, expected)


def _arrived_at_launch(rank: int, world_size: int, steps: int, *, resumed: bool = False) -> list[int]:
    """How many gradients had arrived as each bucket left, in a backward after so many; the first layer comes last.

    Args:
        resumed: whether torch makes state first, by a step with zeros for gradients.
    """
    model = _model()
    policy = zero_opt.Overlapped(0.1)
    model[0].requires_grad_(steps == 1)
    optimizer = zero_opt.ShardedOptimizer(_groups(model), torch.optim.AdamW, reduction=policy)
    if resumed:
        get_optimizer_state_dict(model, optimizer)
    for step in range(steps):
        _loss(model, step, rank).backward()
        model[0].requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()
    arrived, launches = 0, []
    for param in model.parameters():

        def count(_: Tensor) -> None:
            nonlocal arrived
            arrived += 1

        param.register_post_accumulate_grad_hook(count)
    thread = optimizer._engine.parts.thread
    submit = thread.submit

    def noted(*arguments: Any) -> Any:
        launches.append(arrived)
        return submit(*arguments)

    thread.submit = noted  # type: ignore[method-assign]
    _loss(model, 1, rank).backward()
    in_backward = list(launches)
    optimizer.step()
    optimizer.close()
    return in_backward


def test_the_first_bucket_leaves_early_although_vectors_have_a_group_of_their_own() -> None:
    total = len(list(_model().parameters()))
    for launches in run_processes(2, _arrived_at_launch, 1):
        assert launches[0] < total // 4
        assert sum(arrived < total // 2 for arrived in launches) >= 2


def test_the_order_of_buckets_is_that_of_a_backward_although_state_was_made_first() -> None:
    total = len(list(_model().parameters()))
    for launches in run_processes(2, partial(_arrived_at_launch, resumed=True), 1):
        assert launches[0] < total // 4
        assert sum(arrived < total // 2 for arrived in launches) >= 2


def test_a_bucket_that_is_planned_late_does_not_come_first() -> None:
    """The first layer's, once it is trainable: its gradients come last, and all others would wait for it."""
    total = len(list(_model().parameters()))
    for launches in run_processes(2, _arrived_at_launch, 3):
        assert launches[0] < total // 4


def _reduced_on(rank: int, world_size: int, exchange: str, backwards: int) -> tuple[int, Counter[bool]]:
    """How many buckets there are, and how many were reduced on the thread that calls step(), and on others."""
    model, reduce = _model(), GradBucket.reduce_in_stages
    policy = zero_opt.Overlapped(0.1, exchange=exchange)
    optimizer = zero_opt.ShardedOptimizer(_groups(model), torch.optim.AdamW, reduction=policy)
    _loss(model, 0, rank).backward()
    optimizer.step()
    here = Counter[bool]()

    def noted(*arguments: Any) -> Any:
        here[threading.current_thread() is threading.main_thread()] += 1
        return reduce(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GradBucket, "reduce_in_stages", noted)
        for step in range(backwards):
            _loss(model, 1 + step, rank).backward()
        optimizer.step()
    optimizer.close()
    return len(optimizer._engine.partition.buckets), here


def test_the_last_bucket_is_left_to_step_where_its_exchange_takes_the_processor() -> None:
    for backwards in (1, 2):
        for count, here in run_processes(2, _reduced_on, "auto", backwards):
            assert here == Counter({True: 1, False: backwards * count - 1})
    for count, here in run_processes(2, _reduced_on, "backend", 1):
        assert here == Counter({False: count})


def _dropped_at_different_times(rank: int, world_size: int) -> bool:
    """Both drop two rounds, rank 0 once rank 1 has made both; whether nothing waits for another rank then."""
    model = _model()
    optimizer = zero_opt.ShardedOptimizer(_groups(model), torch.optim.AdamW, reduction=zero_opt.Overlapped(0.1))
    thread, made = optimizer._engine.parts.thread, torch.zeros(1)
    _loss(model, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        dist.recv(made, 1)
    for backward in range(2):
        _loss(model, backward, rank).backward()
        if rank == 1 and backward == 1:
            dist.send(made, 0)
        optimizer.zero_grad()
        if rank == 0:
            assert thread.idle_within(60)
    idle = thread.idle_within(60)
    dist.barrier()
    _loss(model, 2, rank).backward()
    optimizer.step()
    optimizer.close()
    return idle


def test_dropped_rounds_are_exchanged_to_their_end() -> None:
    assert all(run_processes(2, _dropped_at_different_times))


def _ordered_otherwise(rank: int, world_size: int, exchange: str, cut: bool) -> str:
    """The error of a step in which the last rank exchanges buckets of the same sizes in another order, or fewer."""
    params = [nn.Parameter(torch.full((64,), float(i))) for i in range(3)]
    policy = zero_opt.Overlapped(64 * 4 / 2**20, exchange=exchange)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=1.0, reduction=policy)
    for _ in range(2):
        sum(param.square().sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [param.detach().clone() for param in params]
    reduction: Any = optimizer._engine.reduction  # type: ignore[union-attr]
    if rank == world_size - 1:
        reduction._active = reduction._active[:-1] if cut else reduction._active[::-1]
    sum(param.square().sum() for param in params).backward()
    with pytest.raises(zero_opt.RankMismatch) as raised:
        optimizer.step()
    assert_bitwise([param.detach() for param in params], before)
    return str(raised.value)


@pytest.mark.parametrize("cut", [False, True], ids=["in another order", "fewer"])
@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_ranks_that_exchange_other_buckets_take_no_step(exchange: str, cut: bool) -> None:
    for said in run_processes(3, _ordered_otherwise, exchange, cut):
        assert said.startswith("rank 2 exchanges other gradient buckets than rank 0, or in another order")


def _in_another_dtype(rank: int, world_size: int, bucket_mb: float) -> list[Tensor]:
    """Parameters after steps of two backwards each, whose gradients add up in another dtype than they travel in."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(12)])
    precision = zero_opt.MixedPrecision(reduce_dtype=torch.bfloat16, accumulate_dtype=torch.float32)
    reduction = zero_opt.Overlapped(bucket_mb, exchange="backend")
    optimizer = zero_opt.ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, reduction=reduction, precision=precision
    )
    for step in range(3):
        for turn in range(2):
            torch.manual_seed(100 * step + 10 * turn + rank)
            model(torch.randn(4, 48)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def test_buckets_under_way_together_have_room_of_their_own_for_means_in_another_dtype() -> None:
    expected, got = (run_processes(2, _in_another_dtype, bucket_mb)[0] for bucket_mb in (25, 0.005))
    assert_bitwise(got, expected)
