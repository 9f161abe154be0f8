"""What gathers of updated parameters do to graphs that have saved some of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.offloads import OFFLOADS

WITHIN_A_STEP = {"none": lambda _: None} | {name: OFFLOADS[name] for name in ("cpu", "worker", "nvme")}


def _halves_in_turn(rank: int, world_size: int, placement: str, late: bool, folder: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    optimizer: Any = zero_opt.ShardedOptimizer(
        model.parameters(),
        torch.optim.SGD,
        lr=0.1,
        momentum=0.5,
        offload=WITHIN_A_STEP[placement](folder),
        reduction=zero_opt.Overlapped(overlap_param_gather=model if late else None),
    )
    for trained, stepper in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)), (model, optimizer)):
        for _ in range(3):
            of_second = trained[1](torch.ones(2, 4)).square().sum()
            trained[0](torch.ones(2, 4)).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
            of_second.backward()
            stepper.step()
            stepper.zero_grad()
    optimizer.flush()
    assert_bitwise([param.detach() for param in model.parameters()], [param.detach() for param in plain.parameters()])
    optimizer.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("placement", WITHIN_A_STEP)
def test_a_graph_of_parameters_that_a_step_has_no_gradient_of_is_not_stale(
    placement: str, late: bool, tmp_path: Any
) -> None:
    run_processes(2, _halves_in_turn, placement, late, str(tmp_path))


def _one_layer_at_a_time(rank: int, world_size: int, late: bool) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero_opt.broadcast_params(layers)
    reduction = zero_opt.Overlapped(overlap_param_gather=layers if late else None)
    optimizer = zero_opt.ShardedOptimizer(layers.parameters(), torch.optim.SGD, lr=0.1, reduction=reduction)
    given = torch.ones(2, 4, requires_grad=True)
    for trained, other in (layers, reversed(layers), layers):
        stale = trained(given).square().sum()
        fresh = other(given).square().sum()
        trained(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.flush()
        torch.autograd.grad(fresh, given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(stale, given)
    optimizer.close()


@pytest.mark.parametrize("late", [False, True])
def test_what_a_step_updates_may_change_from_step_to_step(late: bool) -> None:
    run_processes(2, _one_layer_at_a_time, late)


def _matrices_in_windows(rank: int, world_size: int) -> None:
    """Matrices wait until a window closes; a bias without a gradient is left alone by that."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    zero_opt.broadcast_params(model)
    offload = zero_opt.CPUOffload(selective=zero_opt.Selective(topk_ratio=0.5, update_interval=2))
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), zero_opt.CPUAdamW, lr=0.1, offload=offload)
    for number in range(6):
        kept = model[1].bias.square().sum()
        trained = model[0](torch.ones(2, 4)) if number % 2 else model[0](torch.ones(2, 4)) + model[1].bias
        trained.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 2:
            kept.backward()
            optimizer.zero_grad()
    optimizer.close()


def test_a_window_that_closes_leaves_what_has_no_gradient() -> None:
    run_processes(2, _matrices_in_windows)
