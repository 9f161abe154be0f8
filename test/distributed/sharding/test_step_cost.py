"""Whole parameters go to ranks by what their steps cost, alike on all ranks, and checkpoints do not know of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import values

SHAPES = ((8, 200), (40, 40), (40, 40), (8, 200), (200, 8), (8, 200))


class Factored(torch.optim.Adafactor):
    """A class of the user's."""


class Late(torch.optim.Adafactor):
    """A class of the user's."""


def params_of_seed(seed: int) -> list[nn.Parameter]:
    return [nn.Parameter(values(seed, 0, 0, index, shape).clone()) for index, shape in enumerate(SHAPES)]


def owned(optimizer: Any) -> list[int]:
    """Return the indices of the parameters of which this rank has the state."""
    has = {key for key, state in optimizer.state.items() if any(v.numel() and v.dim() for v in state.values())}
    return [index for index, param in enumerate(optimizer.param_groups[0]["params"]) if param in has]


def backward(params: list[nn.Parameter], step: int, rank: int) -> None:
    grads = [values(step, 1, rank, index, param.shape) for index, param in enumerate(params)]
    torch.autograd.backward(params, grads)


def train(rank: int, world_size: int, loaded: Any = None) -> tuple[list[int], list[Tensor], Any]:
    """Take two steps, the second after a load if a state dict is given; return what this rank owns, too."""
    params = params_of_seed(3)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Muon, lr=0.1)
    for step in range(2):
        if step and loaded is not None:
            optimizer.load_state_dict(loaded)
        backward(params, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    found = owned(optimizer)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return found, [param.detach() for param in params], state


def plain(cls: Any = torch.optim.Muon) -> list[Tensor]:
    params = params_of_seed(3)
    optimizer = cls(params, lr=0.1)
    for step in range(2):
        backward(params, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in params]


def test_muon_is_balanced_by_what_it_multiplies() -> None:
    """A square matrix of as many elements costs seven times as much: each has a rank, the long ones the third."""
    results = run_processes(3, train)
    assert [found for found, _, _ in results] == [[1], [2], [0, 3, 4, 5]]
    for _, params, _ in results:
        assert_bitwise(params, plain())


def state_after_one_step() -> Any:
    params = params_of_seed(3)
    optimizer = torch.optim.Muon(params, lr=0.1)
    backward(params, 0, 0)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_checkpoint_loads_into_any_layout(world_size: int) -> None:
    for _, params, _ in run_threads(world_size, train, state_after_one_step()):
        assert_bitwise(params, plain())


def saved_by_cost(rank: int, world_size: int) -> tuple[list[list[int]], list[Tensor]]:
    """Save under one cost, load under another; return the owned of both, and the parameters after a step."""
    found, held = [], None
    for cost in (lambda shape: shape[0], lambda shape: shape[1]):
        zero_opt.register_cost(Factored, cost)
        params = params_of_seed(3)
        optimizer = zero_opt.ShardedOptimizer(params, Factored, lr=0.1)
        if held is not None:
            with torch.no_grad():
                for param, value in zip(params, held[0], strict=True):
                    param.copy_(value)
            optimizer.load_state_dict(held[1])
        backward(params, len(found), 0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(owned(optimizer))
        held = [param.detach().clone() for param in params], optimizer.state_dict()
        optimizer.close()
    return found, [param.detach() for param in params]


def test_a_users_cost_decides_and_a_checkpoint_outlives_it() -> None:
    results = run_processes(2, saved_by_cost)
    assert results[0][0][0] != results[0][0][1]
    for _, params in results:
        assert_bitwise(params, plain(torch.optim.Adafactor))


def added_group(rank: int, world_size: int) -> list[int]:
    """Give the group that is added to the rank with the least to do so far."""
    zero_opt.register_cost(Factored, lambda shape: float(shape[0]))
    params = [nn.Parameter(torch.ones(shape)) for shape in ((1, 900), (5, 2), (3, 2))]
    optimizer = zero_opt.ShardedOptimizer(params[:2], Factored)
    optimizer.add_param_group({"params": params[2:]})
    for param in params:
        param.sum().backward()
    optimizer.step()
    held = [index for index, param in enumerate(params) if optimizer._engine.partition.owner_of_start(index) == rank]
    optimizer.close()
    return held


def test_a_later_group_counts_what_ranks_have_to_do() -> None:
    assert run_processes(2, added_group) == [[1], [0, 2]]


def differs(rank: int, world_size: int, how: str) -> str:
    if how == "registered on one rank" and rank == 0:
        zero_opt.register_cost(Late, torch.Size.numel)
    elif how == "another number":
        zero_opt.register_cost(Late, lambda shape: float(shape.numel() + rank * shape[0] // 40))
    elif how == "raises":
        zero_opt.register_cost(Late, lambda shape: 1.0 / (1 - rank))
    with pytest.raises(zero_opt.ZeroOptError) as caught:
        zero_opt.ShardedOptimizer(params_of_seed(3), Late, lr=0.1)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("registered on one rank", "RankMismatch: register_cost() of that class: True on rank 0, False on rank 1"),
        (
            "another number",
            "RankMismatch: cost of the step of parameter 1 (group 0, position 1): 1600.0 on rank 0, 1601.0",
        ),
        ("raises", "ConfigError: "),
    ],
)
def test_ranks_whose_costs_differ_are_refused(how: str, message: str) -> None:
    for said in run_processes(2, differs, how):
        assert said.startswith(message)
        assert "Late" in said if how == "raises" else True
