"""torch.compile describes the gradients of a model's parameters, wherever their values are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import values

Call = Callable[[Tensor], Tensor]


def _evaluates(call: Call, x: Tensor, optimizer: Any) -> Tensor:
    """Where the loop begins with zero_grad(), and evaluates after step()."""
    optimizer.zero_grad()
    call(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        return call(x)


def _evaluates_between(call: Call, x: Tensor, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    call(x).square().mean().backward()
    with torch.no_grad():
        between = call(x)
    optimizer.step()
    return between


def _accumulates(call: Call, x: Tensor, optimizer: Any) -> Tensor:
    """Over batches of several sizes, for each of which the model is compiled."""
    for size in range(2, 2 + len(x)):
        call(x[:size]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return call(x).detach()


def _train(rank: int, world_size: int, turn: Callable[..., Tensor], offload: Any, compiles: bool) -> list[Tensor]:
    warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # Dynamo's own, of tensors that it makes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 1))
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, offload=offload)
    call: Call = torch.compile(model, backend="eager", dynamic=False) if compiles else model
    found = [turn(call, values(step, 1, rank, 0, (4, 20)), optimizer).clone() for step in range(3)]
    optimizer.close()
    return found


@pytest.mark.parametrize("offload", [None, zero_opt.WorkerOffload()], ids=["none", "worker"])
@pytest.mark.parametrize("turn", [_evaluates, _evaluates_between, _accumulates])
def test_a_compiled_model_trains_as_it_does_uncompiled(turn: Callable[..., Tensor], offload: Any) -> None:
    plain, compiled = (run_processes(2, _train, turn, offload, compiles) for compiles in (False, True))
    assert_bitwise(compiled, plain)
