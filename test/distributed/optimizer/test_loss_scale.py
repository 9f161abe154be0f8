"""Loss scales of GradScaler that are not those of the other ranks, or of another step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import OVERLAPPED


def _refused(param: Tensor, optimizer: zero_opt.ShardedOptimizer, scaler: torch.amp.GradScaler) -> str:
    """Return what scaler.step() says, which must raise and leave the parameter, all ones, as it is.

    A step without a scaler comes after it.
    """
    scaler.scale(param.float().sum()).backward()
    with pytest.raises(zero_opt.RankMismatch) as caught:
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones_like(param))
    optimizer.zero_grad()
    param.float().sum().backward()
    optimizer.step()
    assert torch.equal(param, torch.ones_like(param) - 0.1)
    optimizer.close()
    return str(caught.value)


def _scale_apart(rank: int, world_size: int, dtype: torch.dtype, reduction: Any) -> str:
    """Each rank has a loss scale of its own, as where one alone has loaded that of a checkpoint."""
    params = [torch.nn.Parameter(torch.ones(200, dtype=dtype))]
    precision = zero_opt.MixedPrecision(master_dtype=torch.float32 if dtype is torch.float16 else None)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=reduction, precision=precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank))
    return _refused(params[0], optimizer, scaler)


@pytest.mark.parametrize("reduction", [OVERLAPPED, zero_opt.AtStep(), zero_opt.AlreadyReduced()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loss_scales_that_differ_between_ranks_are_refused(dtype: torch.dtype, reduction: Any) -> None:
    for message in run_processes(2, _scale_apart, dtype, reduction):
        assert message.startswith("loss scale of GradScaler: 16.0 on rank 0, 32.0 on rank 1")


def _scaled_on_one_rank(rank: int, world_size: int, dtype: torch.dtype, reduction: Any) -> str:
    params = [torch.nn.Parameter(torch.ones(200, dtype=dtype))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=reduction)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=rank == 0)
    return _refused(params[0], optimizer, scaler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_scaled_on_one_rank_alone_are_refused_at_once(dtype: torch.dtype) -> None:
    for message in run_processes(2, _scaled_on_one_rank, dtype, OVERLAPPED):
        assert message.startswith("rank 0 called scaler.unscale_() where rank 1 called step(); use GradScaler on every")
    for reduction in (zero_opt.AtStep(), zero_opt.AlreadyReduced()):
        for message in run_processes(2, _scaled_on_one_rank, dtype, reduction):
            assert message.startswith("loss scale of GradScaler: 16.0 on rank 0, 1.0 on rank 1")


def _unscaled_apart(rank: int, world_size: int, reduction: Any) -> str:
    params = [torch.nn.Parameter(torch.ones(200))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=reduction)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank))
    scaler.scale(params[0].sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(zero_opt.RankMismatch) as caught:
        scaler.step(optimizer)
    assert torch.equal(params[0], torch.ones(200))
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("reduction", [zero_opt.AtStep(), zero_opt.AlreadyReduced()], ids=repr)
def test_loss_scales_are_compared_though_gradients_are_unscaled_before_the_step(reduction: Any) -> None:
    for message in run_processes(2, _unscaled_apart, reduction):
        assert message.startswith("loss scale of GradScaler: 16.0 on rank 0, 32.0 on rank 1")


def _scaled_again(rank: int, world_size: int, dtype: torch.dtype, reduction: Any) -> Tensor:
    """After a step that raises, GradScaler's attributes are gone: it would multiply the next scale by them."""
    params = [torch.nn.Parameter(torch.ones(200, dtype=dtype))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.125, reduction=reduction)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(params[0].float().sum()).backward()
    optimizer.param_groups[0]["lr"] = 0.125 * (1 + rank)
    with pytest.raises(zero_opt.RankMismatch, match="hyperparameter lr"):
        scaler.step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    scaler.step(optimizer)
    optimizer.close()
    return params[0].detach()


@pytest.mark.parametrize("reduction", [OVERLAPPED, zero_opt.AtStep()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_that_raised_leaves_no_loss_scale_to_the_next(dtype: torch.dtype, reduction: Any) -> None:
    for stepped in run_processes(2, _scaled_again, dtype, reduction):
        assert torch.equal(stepped, torch.full((200,), 0.875, dtype=dtype))


# -- overflows --------------------------------------------------------------------------------------------------------


def _overflowing(
    rank: int, world_size: int, reduction: Any, dtype: torch.dtype, unscale: bool, by_optimizer: bool
) -> list[tuple[float, float, float]]:
    """Train; step 1 overflows on rank 1 alone, and step 3, the last one, on rank 0 alone.

    Returns:
        After each step: the first element of the parameter, the loss scale, and the first element of the gradient.
    """
    param = torch.nn.Parameter(torch.ones(200, dtype=dtype))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.125, reduction=reduction)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
    seen = []
    for step in range(4):
        loss = param.float().sum() * (1 + rank)
        scaler.scale(loss * torch.inf if (step, rank) in ((1, 1), (3, 0)) else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e6)
        scaler.step(optimizer)
        scaler.update()
        assert param.grad is not None
        seen.append((param[0].item(), scaler.get_scale(), param.grad[0].item()))
        if by_optimizer:
            optimizer.zero_grad()
        else:
            param.grad = None
    optimizer.close()
    return seen


@pytest.mark.parametrize("by_optimizer", [True, False], ids=["opt.zero_grad", "model.zero_grad"])
@pytest.mark.parametrize(("dtype", "unscale"), [(torch.float32, False), (torch.float32, True), (torch.float16, False)])
def test_at_step_an_overflow_on_one_rank_keeps_every_rank_from_stepping(
    dtype: torch.dtype, unscale: bool, by_optimizer: bool
) -> None:
    runs = run_processes(2, _overflowing, zero_opt.AtStep(), dtype, unscale, by_optimizer)
    for rank, seen in enumerate(runs):
        assert [value for value, _, _ in seen] == [0.8125, 0.8125, 0.625, 0.625]
        assert [scale for _, scale, _ in seen] == [16.0, 8.0, 8.0, 4.0]
        scaled = 16.0 if dtype is torch.float16 else 1.0
        assert seen[0][2] == scaled * (1 + rank)  # unscaled in place, as GradScaler does


def _none_on_one_rank(rank: int, world_size: int) -> tuple[float, float]:
    param = torch.nn.Parameter(torch.ones(200))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.125, reduction=zero_opt.AtStep())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
    for factor in (1.0, torch.inf):
        optimizer.zero_grad()
        loss = scaler.scale(param.sum() * factor)
        if rank == 0:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.close()
    return param[0].item(), scaler.get_scale()


def test_at_step_a_rank_without_gradients_follows_the_others_loss_scale() -> None:
    assert run_processes(2, _none_on_one_rank) == [(0.9375, 8.0)] * 2


def _beside_a_rank_without_inputs(rank: int, world_size: int) -> float:
    param = torch.nn.Parameter(torch.ones(200))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=0.125, reduction=zero_opt.AtStep())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with Join([optimizer]):
        for step in range(4 if rank == 0 else 1):
            scaler.scale(param.sum() * (torch.inf if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return param[0].item()


def test_at_step_a_rank_without_inputs_leaves_out_the_others_overflow() -> None:
    assert run_processes(2, _beside_a_rank_without_inputs) == [0.75] * 2


def _clipped(rank: int, world_size: int, offload: Any, scale: float) -> list[Tensor]:
    """fp16 parameters with fp32 masters, clipped in the step, after torch has refused to unscale before it."""
    param = torch.nn.Parameter(torch.linspace(-2, 2, 100).half())
    precision = zero_opt.MixedPrecision(master_dtype=None if offload else torch.float32)
    optimizer = zero_opt.ShardedOptimizer(
        [param], torch.optim.SGD, lr=0.5, offload=offload, precision=precision, max_grad_norm=1.0
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(3):
        scaler.scale(param.float().square().sum() / 2).backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    optimizer.close()
    return [param.detach()]


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()], ids=["none", "cpu"])
def test_fp16_gradients_are_unscaled_and_clipped_in_the_step(offload: Any) -> None:
    plain, scaled = (run_processes(2, _clipped, offload, scale) for scale in (1.0, 64.0))
    assert_bitwise(scaled, plain)


# -- clipped before they are unscaled ---------------------------------------------------------------------------------


def _clipped_while_scaled(rank: int, world_size: int, reduction: Any, options: dict[str, Any], again: bool) -> Any:
    """Clip scaled gradients, to a norm that is far below theirs, and have GradScaler unscale them in its step.

    Args:
        again: call ``scaler.step()`` once more with the gradients of every step, which divides them once more.

    Returns:
        The parameters after each step, the norms before clipping, and the loss scales.
    """
    dtype = torch.bfloat16 if "precision" in options else torch.float32
    params: list[Tensor] = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((30, 7), (64,), ())]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.5, reduction=reduction, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=96.0, growth_interval=2)
    generator, seen = torch.Generator().manual_seed(rank), []
    for step in range(5):
        loss = sum((param * torch.randn(param.shape, generator=generator).to(dtype)).sum() for param in params)
        scaler.scale(loss * torch.inf if step == 3 else loss).backward()
        norm = optimizer.clip_grad_norm_(100.0)
        for _ in range(1 + again):
            scaler.step(optimizer)
            scaler.update()
        seen.append(([param.detach().clone() for param in params], norm, scaler.get_scale()))
        optimizer.zero_grad()
    optimizer.close()
    return seen


@pytest.mark.parametrize("again", [False, True], ids=["", "again"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offload": zero_opt.CPUOffload()},
        {"offload": zero_opt.WorkerOffload()},
        {"precision": zero_opt.MixedPrecision(master_dtype=torch.float32)},
    ],
    ids=["none", "cpu", "worker", "masters"],
)
def test_at_step_gradients_may_be_clipped_before_they_are_unscaled(options: dict[str, Any], again: bool) -> None:
    overlapped = run_processes(2, _clipped_while_scaled, OVERLAPPED, options, again)
    assert_bitwise(run_processes(2, _clipped_while_scaled, zero_opt.AtStep(), options, again), overlapped)
