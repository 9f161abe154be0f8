"""Parameters that are planned while some ranks have had a backward and others have not: all exchange the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes

SHAPE, STEPS, LR = (16, 16), 3, 0.25
BUCKET_MB = 1e-3  # each parameter has a bucket of its own
OPTIONS = {"lr": LR, "momentum": 0.5}


def _grad(step: int, rank: int, at: int) -> Tensor:
    """Small integers, of which sums have the same bits in any order."""
    return torch.full(SHAPE, float(1 + step + 2 * at + 4 * rank))


def _backward(params: list[Tensor], step: int, rank: int) -> None:
    torch.autograd.backward(params, [_grad(step, rank, at) for at in range(len(params))])


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(SHAPE)) for _ in range(3)]


def _new(how: str, params: list[nn.Parameter], make: Any) -> Any:
    """The last parameter comes later: in a group of its own, or as it is frozen."""
    params[2].requires_grad_(how == "added")
    return make(params[:2] if how == "added" else params)


def _plan_last(how: str, params: list[nn.Parameter], optimizer: Any) -> None:
    if how == "added":
        optimizer.add_param_group({"params": [params[2]]})
        return
    params[2].requires_grad_(True)
    saved = torch.optim.SGD([nn.Parameter(param.detach().clone()) for param in params], **OPTIONS)
    for param in saved.param_groups[0]["params"]:
        param.grad = torch.ones(SHAPE)
    saved.step()
    optimizer.load_state_dict(saved.state_dict())


def _begin(how: str, params: list[nn.Parameter], optimizer: Any, ranks: list[int], drops: bool) -> None:
    """Have a first backward of these ranks, plan the last parameter, and drop the gradients if told to."""
    for rank in ranks:
        _backward(params[:2], 0, rank)
    params[1].requires_grad_(not drops)
    _plan_last(how, params, optimizer)
    if drops:
        optimizer.zero_grad()


def _train(rank: int, world_size: int, how: str, who: list[int], drops: bool, exchange: str) -> list[Tensor]:
    """The ranks in ``who`` alone have a first backward, which all drop or keep."""
    params, reduction = _params(), zero_opt.Overlapped(BUCKET_MB, exchange=exchange)
    checks = zero_opt.Checks(timeout=60)
    optimizer = _new(
        how,
        params,
        lambda those: zero_opt.ShardedOptimizer(those, torch.optim.SGD, reduction=reduction, checks=checks, **OPTIONS),
    )
    _begin(how, params, optimizer, [rank] if rank in who else [], drops)
    for step in range(STEPS):
        _backward([param for param in params if param.requires_grad][: 3 if step else 1], step, rank)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [param.detach() for param in params]


def _expected(world_size: int, how: str, who: list[int], drops: bool) -> list[Tensor]:
    """What a plain optimizer makes of the mean gradients."""
    params = _params()
    plain = _new(how, params, lambda those: torch.optim.SGD(those, **OPTIONS))
    _begin(how, params, plain, who, drops)
    for step in range(STEPS):
        for rank in range(world_size):
            _backward([param for param in params if param.requires_grad][: 3 if step else 1], step, rank)
        for param in params:
            if param.grad is not None:
                param.grad /= world_size
        plain.step()
        plain.zero_grad()
    return [param.detach() for param in params]


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "kept"])
@pytest.mark.parametrize("who", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("how", ["added", "loaded"])
def test_params_planned_after_a_backward_of_some_ranks(how: str, who: list[int], drops: bool, exchange: str) -> None:
    expected = _expected(2, how, who, drops)
    for found in run_processes(2, _train, how, who, drops, exchange):
        assert_bitwise(found, expected)
