"""Loss scales of GradScaler that are not those of the other ranks, or of another step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.support.actors import OVERLAPPED
from test.support.harness import run_processes


def _refused(param: Tensor, optimizer: zero_opt.ShardedOptimizer, scaler: torch.amp.GradScaler) -> str:
    """Return what scaler.step() says, which must raise and leave the parameter, all ones, as it is."""
    scaler.scale(param.float().sum()).backward()
    with pytest.raises(zero_opt.RankMismatch) as caught:
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones_like(param))
    optimizer.close()
    return str(caught.value)


def _scale_apart(rank: int, world_size: int, dtype: torch.dtype, reduction: Any) -> str:
    """Each rank has a loss scale of its own, as where one alone has loaded that of a checkpoint."""
    params = [torch.nn.Parameter(torch.ones(200, dtype=dtype))]
    precision = zero_opt.MixedPrecision(master_dtype=torch.float32 if dtype is torch.float16 else None)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=reduction, precision=precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank))
    return _refused(params[0], optimizer, scaler)


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [(torch.float32, OVERLAPPED), (torch.float16, OVERLAPPED), (torch.float16, zero_opt.AtStep())],
)
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
    if dtype is torch.float16:  # of which the step unscales
        for message in run_processes(2, _scaled_on_one_rank, dtype, zero_opt.AtStep()):
            assert message.startswith("loss scale of GradScaler: 16.0 on rank 0, 1.0 on rank 1")


def _scaled_again(rank: int, world_size: int) -> Tensor:
    """After a step that raises, GradScaler's attributes are gone: it would multiply the next scale by them."""
    params = [torch.nn.Parameter(torch.ones(200, dtype=torch.float16))]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.125)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(params[0].float().sum()).backward()
    optimizer.param_groups[0]["lr"] = 0.125 * (1 + rank)
    with pytest.raises(zero_opt.RankMismatch, match="hyperparameter lr"):
        scaler.step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    scaler.step(optimizer)
    optimizer.close()
    return params[0].detach()


def test_a_step_that_raised_leaves_no_loss_scale_to_the_next() -> None:
    for stepped in run_processes(2, _scaled_again):
        assert torch.equal(stepped, torch.full((200,), 0.875, dtype=torch.float16))
