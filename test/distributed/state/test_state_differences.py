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


class _Averaged(torch.optim.SGD):
    """A class of which nothing is known, so that ranks show state of the parameters that they step alone."""


def _clear(rank: int, world_size: int) -> Any:
    params = _params()
    optimizer = zero_opt.ShardedOptimizer(params, _Averaged, lr=0.1, momentum=0.9, reduction=zero_opt.AtStep())
    shown = []
    for step in range(3):
        for number, param in enumerate(params):
            param.grad = torch.full_like(param, 1.0 + number)
        optimizer.step()
        shown.append([bool(optimizer.state.get(param)) for param in params])
        if step == 1:
            optimizer.state.clear()
    optimizer.close()
    return shown, [param.detach() for param in params]


def test_state_that_ranks_do_not_all_show_is_cleared_on_every_rank() -> None:
    plain = _params()
    reference = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
    for step in range(3):
        for number, param in enumerate(plain):
            param.grad = torch.full_like(param, 1.0 + number)
        reference.step()
        if step == 1:
            reference.state.clear()
    found = run_threads(2, _clear)
    assert found[0][0] != found[1][0]
    for _, params in found:
        assert_bitwise(params, [param.detach() for param in plain])


def _drop_on_one_rank(rank: int, world_size: int) -> str:
    params, optimizer = _stepped()
    dropped = [params[0]] if rank == 2 else []
    for param in dropped:
        del optimizer.state[param]
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.step()
    if rank != 2:
        del optimizer.state[params[0]]
    optimizer.step()
    assert [float(optimizer.state[param]["step"]) for param in params] == [1.0, 2.0, 2.0]
    optimizer.close()
    return str(caught.value)


def test_state_that_one_rank_has_dropped_may_be_dropped_on_the_others_too() -> None:
    wanted = "state was dropped of parameter 0 (group 0, position 0) on rank 2 and not on rank 0"
    for message in run_threads(3, _drop_on_one_rank):
        assert wanted in message, message
