"""Ranks that load different state, or step with different hyperparameters; and state that the user edits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(0.0, 1.0, numel)) for numel in (300, 70, 1)]


def _stepped() -> tuple[list[nn.Parameter], zero_opt.ShardedOptimizer]:
    params = _params()
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.Adam, lr=0.1, reduction=zero_opt.AtStep())
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return params, optimizer


def _load_another_file(rank: int, world_size: int, what: str) -> Any:
    _, optimizer = _stepped()
    optimizer.consolidate_state_dict(to=0)
    before = optimizer.state_dict() if rank == 0 else None
    states: list[Any] = [before]
    torch.distributed.broadcast_object_list(states)
    given = copy.deepcopy(states[0])
    if rank == 1:
        if what == "lr":
            given["param_groups"][0]["lr"] = 0.2
        elif what == "step":
            given["state"][1]["step"] += 1
        else:
            given["state"][0]["exp_avg"].view(-1)[-1] += 1
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.load_state_dict(given)
    optimizer.consolidate_state_dict(to=0)
    after = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return str(caught.value), before, after


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("lr", "hyperparameter lr of group 0"),
        ("step", "'step' of parameter 1"),
        ("a value", "'exp_avg' of parameter 0"),
    ],
)
def test_ranks_that_load_different_things_are_refused(what: str, named: str) -> None:
    found = run_processes(2, _load_another_file, what)
    assert all(named in message for message, _, _ in found), found
    assert_bitwise(found[0][2], found[0][1])


def _step_with_another_lr(rank: int, world_size: int, tensor: bool) -> str:
    params, optimizer = _stepped()
    before = [param.detach().clone() for param in params]
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(0.5 if rank else 0.25) if tensor else 0.1 + rank
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.step()
    assert_bitwise([param.detach() for param in params], before)
    group["lr"] = 0.1
    optimizer.step()
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("tensor", [False, True])
def test_hyperparameters_that_differ_in_a_step_are_refused(tensor: bool) -> None:
    for message in run_threads(3, _step_with_another_lr, tensor):
        assert "hyperparameter lr of group 0" in message and "on rank 1" in message


def _edit_after_consolidating(rank: int, world_size: int) -> Any:
    params, optimizer = _stepped()
    optimizer.consolidate_state_dict(to=0)
    for param in params:
        optimizer.state[param]["exp_avg"].fill_(3.0)
    torch.distributed.barrier()
    found = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
    torch.distributed.barrier()
    del optimizer.state[params[0]]
    optimizer.consolidate_state_dict(to=0)
    dropped = sorted(optimizer.state_dict()["state"]) if rank == 0 else None
    optimizer.close()
    return [bool((tensor == 3.0).all()) for tensor in found], dropped


def test_edits_after_a_consolidation_are_in_the_state_dict() -> None:
    found = run_processes(2, _edit_after_consolidating)
    assert all(all(same) for same, _ in found), found
    assert 0 not in found[0][1] and 1 in found[0][1]
