"""Placements that have nothing to step: at first, as all parameters are frozen, or on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB

SELECTIVE = zero_opt.Selective(topk_ratio=0.5, update_interval=2)
OFFLOADS: dict[str, Callable[[Path], Any]] = {
    "none": lambda _: None,
    "cpu": lambda _: zero_opt.CPUOffload(),
    "worker": lambda _: zero_opt.WorkerOffload(),
    "delayed": lambda _: zero_opt.WorkerOffload(delay=1),
    "speculating": lambda _: zero_opt.WorkerOffload(speculate=True),
    "nvme": lambda folder: zero_opt.NVMeOffload(folder),
    "cpu, selective": lambda _: zero_opt.CPUOffload(selective=SELECTIVE),
    "worker, selective": lambda _: zero_opt.WorkerOffload(selective=SELECTIVE),
    "delayed, selective": lambda _: zero_opt.WorkerOffload(delay=1, selective=SELECTIVE),
    "nvme, selective": lambda folder: zero_opt.NVMeOffload(folder, selective=SELECTIVE),
}


def _train(rank: int, world_size: int, name: str, folder: Path, shapes: Any, frozen: bool) -> list[Tensor]:
    """The first step meets no gradient. Then there are fixed ones."""
    params = [nn.Parameter(torch.ones(shape), requires_grad=not frozen) for shape in shapes]
    optimizer = zero_opt.ShardedOptimizer(
        params,
        torch.optim.AdamW,
        reduction=zero_opt.Overlapped(BUCKET_MB),
        offload=OFFLOADS[name](folder),
        fused=True,
        lr=0.01,
    )
    optimizer.step()
    optimizer.flush()
    assert all(not entry for entry in optimizer.state_dict()["state"].values()) or not frozen
    for param in params:
        param.requires_grad_()
    for step in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(params, [torch.full_like(param, 1.0 + step + rank) for param in params])
        optimizer.step()
    optimizer.flush()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()
    return [param.detach() for param in params]


def _train_both(rank: int, world_size: int, name: str, folder: Path, shapes: Any) -> list[list[Tensor]]:
    return [_train(rank, world_size, name, folder, shapes, frozen) for frozen in (False, True)]


@pytest.mark.parametrize("shapes", [[(6, 8), (5,)], [(0,), (5,)]])
@pytest.mark.parametrize("name", OFFLOADS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_that_are_all_frozen_at_first(world_size: int, name: str, shapes: Any, tmp_path: Path) -> None:
    """With small shapes, one of two ranks has no part of a matrix."""
    for wanted, found in run_processes(world_size, _train_both, name, tmp_path, shapes):
        assert_bitwise(found, wanted)
        assert all(not torch.equal(param, torch.ones_like(param)) for param in wanted if param.numel())
