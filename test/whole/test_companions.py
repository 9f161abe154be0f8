"""Beside what else runs in a backward: checkpointing, other collectives, other optimizers, GradScaler, DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import OVERLAPPED

STEPS, WIDTH = 4, 16


def _data(step: int, rank: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def _layers(count: int, seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))


def _bits(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def _mean_grads(world_size: int, params: Iterable[nn.Parameter], backward: Callable[[int], Any]) -> None:
    """Put the rank-ordered mean of all ranks' gradients into ``p.grad``; ``backward(rank)`` plays one rank."""
    params = list(params)
    local = []
    for rank in range(world_size):
        for param in params:
            param.grad = None
        backward(rank)
        local.append([param.grad for param in params])
    for param, *grads in zip(params, *local, strict=True):
        if any(grad is not None for grad in grads):
            zero = torch.zeros_like(param)
            total = zero if grads[0] is None else grads[0].clone()
            for grad in grads[1:]:
                total += zero if grad is None else grad
            param.grad = total / world_size


# ---------------------------------------------------------------------------------------------------------------------
# checkpointing


class Checkpointed(nn.Module):
    """Every parameter inside a checkpointed segment; one layer used twice, one weight shared by two layers."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = _layers(5), reentrant
        self.layers[4][0].weight = self.layers[0][0].weight  # type: ignore[index]

    def forward(self, value: Tensor) -> Tensor:
        for number in (0, 1, 2, 3, 1, 4):
            value = checkpoint(self.layers[number], value, use_reentrant=self.reentrant)
        return value.square().mean()


def _train_checkpointed(rank: int, world_size: int, reentrant: bool) -> list[Tensor]:
    model = Checkpointed(reentrant)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, reduction=OVERLAPPED)
    for step in range(STEPS):
        for turn in range(1 + step % 2):
            model(_data(10 * step + turn, rank).requires_grad_()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return _bits(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments(reentrant: bool) -> None:
    """Equal up to how a parameter used twice is summed up: autograd adds its two gradients, or we their means."""
    model = Checkpointed(reentrant)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        total: list[Any] = []
        for turn in range(1 + step % 2):

            def backward(rank: int, number: int = 10 * step + turn) -> None:
                model(_data(number, rank).requires_grad_()).backward()

            _mean_grads(2, model.parameters(), backward)
            grads = [param.grad for param in model.parameters()]
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads  # type: ignore[operator]
        for param, grad in zip(model.parameters(), total, strict=True):
            param.grad = grad
        optimizer.step()
    runs = run_processes(2, _train_checkpointed, reentrant)
    assert_bitwise(runs[1], runs[0])
    if not reentrant:
        assert_bitwise(runs[0], _bits(model))
    for found, expected in zip(runs[0], _bits(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# collectives in the same backward


class MeanOverRanks(torch.autograd.Function):
    """As SyncBatchNorm: an all-reduce in forward and another in backward, on the default group."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        mean = value.mean(0)
        dist.all_reduce(mean)
        return value - mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        mean = grad.mean(0)
        dist.all_reduce(mean)
        return grad - mean / dist.get_world_size()


def _train_synchronised(rank: int, world_size: int, reduction: Any) -> list[Tensor]:
    model = _layers(8)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, reduction=reduction)
    for step in range(STEPS):
        value = _data(step, rank)
        for layer in model:
            value = MeanOverRanks.apply(layer(value))  # type: ignore[no-untyped-call]
        loss = value.square().mean()
        loss.backward()
        optimizer.zero_grad() if step == 1 else optimizer.step()
        logged = loss.detach().clone()
        dist.all_reduce(logged)  # the user's own
        optimizer.zero_grad()
        dist.barrier()
    optimizer.close()
    return _bits(model)


def test_collectives_inside_and_between_backwards() -> None:
    at_step = run_processes(3, _train_synchronised, zero_opt.AtStep())
    for bits in run_processes(3, _train_synchronised, OVERLAPPED):
        assert_bitwise(bits, at_step[0])


class Fork(nn.Module):
    """Two branches whose backwards run in the order in which their forwards did not; ranks differ in it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _layers(4, seed=1), _layers(4, seed=2)

    def forward(self, value: Tensor, left_first: bool) -> Tensor:
        outputs = {}
        for name in ("left", "right") if left_first else ("right", "left"):
            branch = value
            for layer in getattr(self, name):
                branch = layer(branch)
            outputs[name] = branch
        return (outputs["left"] * outputs["right"]).mean()


def _train_forked(rank: int, world_size: int) -> list[Tensor]:
    model = Fork()
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, reduction=OVERLAPPED)
    for step in range(STEPS):
        model(_data(step, rank), left_first=(step + rank) % 2 == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return _bits(model)


def test_ranks_whose_gradients_arrive_in_different_order() -> None:
    model = Fork()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):

        def backward(rank: int, step: int = step) -> None:
            model(_data(step, rank), left_first=(step + rank) % 2 == 0).backward()

        _mean_grads(3, model.parameters(), backward)
        optimizer.step()
    for bits in run_processes(3, _train_forked):
        assert_bitwise(bits, _bits(model))


# ---------------------------------------------------------------------------------------------------------------------
# two optimizers in turn


def _through(model: nn.ModuleList, value: Tensor) -> Tensor:
    for layer in model:
        value = layer(value)
    return value


def _gan_losses(generator: nn.ModuleList, critic: nn.ModuleList, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The critic's loss on detached fakes, and the generator's, which flows through the critic too."""
    fake = _through(generator, _data(step, rank))
    for_critic = (_through(critic, fake.detach()) - _through(critic, _data(step + 500, rank))).mean()
    return for_critic, _through(critic, fake).square().mean()


def _train_gan(rank: int, world_size: int, zero_by_module: bool) -> list[list[Tensor]]:
    generator, critic = _layers(4, seed=1), _layers(5, seed=2)
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    for_generator = zero_opt.ShardedOptimizer(generator.parameters(), adam, lr=0.01, reduction=OVERLAPPED)
    for_critic = zero_opt.ShardedOptimizer(critic.parameters(), sgd, lr=0.1, momentum=0.9, reduction=OVERLAPPED)
    for step in range(STEPS):
        critic.zero_grad() if zero_by_module else for_critic.zero_grad()  # the generator's backward left gradients
        _gan_losses(generator, critic, step, rank)[0].backward()
        for_critic.step()
        generator.zero_grad() if zero_by_module else for_generator.zero_grad()
        _gan_losses(generator, critic, step, rank)[1].backward()
        for_generator.step()
    for_generator.close()
    for_critic.close()
    return [_bits(generator), _bits(critic)]


@pytest.mark.parametrize("zero_by_module", [False, True])
def test_two_optimizers_of_which_one_pollutes_the_others_gradients(zero_by_module: bool) -> None:
    generator, critic = _layers(4, seed=1), _layers(5, seed=2)
    for_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    for_critic = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for part, optimizer in ((0, for_critic), (1, for_generator)):

            def backward(rank: int, step: int = step, part: int = part) -> None:
                _gan_losses(generator, critic, step, rank)[part].backward()

            _mean_grads(2, [*generator.parameters(), *critic.parameters()], backward)
            optimizer.step()
    for bits in run_processes(2, _train_gan, zero_by_module):
        assert_bitwise(bits, [_bits(generator), _bits(critic)])


# ---------------------------------------------------------------------------------------------------------------------
# GradScaler


def _train_scaled(rank: int, world_size: int, reduction: Any, unscale: bool) -> tuple[list[Tensor], list[float]]:
    """Step 1 overflows on rank 1 alone, in one parameter."""
    model = _layers(4)
    model[1].double()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, reduction=reduction)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        before = _bits(model)
        loss = _scaled_loss(model, step, rank)
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        if step == 2:
            with optimizer.no_sync():  # gradients of the last two layers, which stay plain until the step
                scaler.scale(_scaled_loss(model[2:], step + 50, rank)).backward()
            scaler.scale(_scaled_loss(model[:2], step, rank)).backward()
        else:
            scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e6)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == 1:
            assert_bitwise(_bits(model), before)
    optimizer.close()
    return _bits(model), scales


def _scaled_loss(model: nn.ModuleList, step: int, rank: int) -> Tensor:
    value = _data(step, rank)
    for layer in model:
        value = layer(value.to(layer[0].weight.dtype)).float()
    return value.square().mean()


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_on_one_rank_keeps_every_rank_from_stepping(unscale: bool) -> None:
    model = _layers(4)
    model[1].double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (0, 2, 3):

        def backward(rank: int, step: int = step) -> None:
            if step == 2:
                _scaled_loss(model[2:], step + 50, rank).backward()
                _scaled_loss(model[:2], step, rank).backward()
            else:
                _scaled_loss(model, step, rank).backward()

        _mean_grads(2, model.parameters(), backward)
        optimizer.step()
    runs = run_processes(2, _train_scaled, OVERLAPPED, unscale)
    for bits, scales in runs:
        assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
        assert_bitwise(bits, _bits(model))  # scales are powers of two: exact


# ---------------------------------------------------------------------------------------------------------------------
# DistributedDataParallel


def _train_ddp(rank: int, world_size: int, reduction: Any, views: bool) -> list[Tensor]:
    model = _layers(4)
    wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(*model), gradient_as_bucket_view=views)
    params: Any = [{"params": model[:2].parameters(), "lr": 0.02}, {"params": model[2:].parameters()}]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(params)
    if reduction is not None:
        params = [{"params": model[:2].parameters(), "lr": 0.02}, {"params": model[2:].parameters()}]
        optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=reduction)
    for step in range(STEPS):
        if step == 2:
            with wrapped.no_sync():
                wrapped(_data(step + 50, rank)).square().mean().backward()
        wrapped(_data(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return _bits(model)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_already_reduced_under_ddp_is_the_plain_optimizer_under_ddp(world_size: int, views: bool) -> None:
    plain = run_processes(world_size, _train_ddp, None, views)
    for bits in run_processes(world_size, _train_ddp, zero_opt.AlreadyReduced(), views):
        assert_bitwise(bits, plain[0])


def _double_reduction(rank: int, world_size: int, views: bool) -> str:
    with pytest.raises(zero_opt.ZeroOptError) as caught:
        _train_ddp(rank, world_size, OVERLAPPED, views)
    return str(caught.value)


@pytest.mark.parametrize("views", [False, True])
def test_two_reducers_are_refused_and_the_way_out_is_named(views: bool) -> None:
    for message in run_processes(2, _double_reduction, views):
        assert "AlreadyReduced()" in message


def _never_synced(rank: int, world_size: int) -> str:
    wrapped = nn.parallel.DistributedDataParallel(_layers(1)[0])
    reduction = zero_opt.AlreadyReduced()
    optimizer = zero_opt.ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, reduction=reduction)
    with wrapped.no_sync():
        wrapped(_data(0, rank)).square().mean().backward()
    with pytest.raises(zero_opt.GradientConflict) as caught:
        optimizer.step()
    wrapped(_data(1, rank)).square().mean().backward()
    optimizer.step()
    optimizer.close()
    return str(caught.value)


def test_a_step_after_no_sync_alone_names_it() -> None:
    for message in run_processes(2, _never_synced):
        assert "run the last backward of each step outside ddp.no_sync()" in message


def _unreduced(rank: int, world_size: int) -> str:
    """AlreadyReduced without DDP, where only one rank has a gradient: certainly not reduced."""
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(7))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=zero_opt.AlreadyReduced())
    params[0].grad = torch.ones(5)
    if rank == 0:
        params[1].grad = torch.ones(7)
    with pytest.raises(zero_opt.GradientConflict) as caught:
        optimizer.step()
    assert_bitwise(_bits(nn.ParameterList(params)), [torch.ones(5), torch.ones(7)])
    optimizer.close()
    return str(caught.value)


def test_a_gradient_on_some_ranks_only_is_not_reduced_already() -> None:
    for message in run_processes(2, _unreduced):
        assert "parameter 1 " in message and "rank 0" in message and "rank 1" in message and "AtStep()" in message
