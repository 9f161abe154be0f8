"""A param group that one rank cannot take in is added nowhere: what the other ranks had taken in is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes

OFFLOADS = {
    "none": lambda path: None,
    "cpu": lambda path: zero_opt.CPUOffload(),
    "worker": lambda path: zero_opt.WorkerOffload(),
    "speculation": lambda path: zero_opt.WorkerOffload(speculate=True),
    "nvme": lambda path: zero_opt.NVMeOffload(str(path)),
    "selective": lambda path: zero_opt.CPUOffload(selective=zero_opt.Selective(0.5, 2, 2)),
}


def _params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 8), (100,), (30, 12))]


def _train(params: list[nn.Parameter], optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        for param in params:
            (param * (step + rank + 1)).sin().sum().backward()
        optimizer.step()


def _run(rank: int, world_size: int, name: str, path: Path, fails: bool) -> list[Tensor]:
    params = _params()
    optimizer = zero_opt.ShardedOptimizer(params[:1], torch.optim.AdamW, lr=0.1, offload=OFFLOADS[name](path))
    _train(params[:1], optimizer, range(2), rank)
    if fails:
        placement = type(optimizer._engine.parts.placement)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(placement, "add", _no_room)
            with pytest.raises(zero_opt.OutOfMemory, match="no room"):
                optimizer.add_param_group({"params": params[1:], "amsgrad": name != "selective"})
        assert len(optimizer.param_groups) == 1
    if world_size > 1:
        optimizer.consolidate_state_dict(to=0)
        full = [optimizer.state_dict() if rank == 0 else None]
        torch.distributed.broadcast_object_list(full, 0)
        optimizer.load_state_dict(full[0])
    _train(params[:1], optimizer, range(2, 4), rank)
    optimizer.add_param_group({"params": params[1:], "lr": 0.2})
    _train(params, optimizer, range(4, 6), rank)
    optimizer.flush()
    optimizer.close()
    return [param.detach().clone() for param in params]


def _no_room(*_: Any) -> None:
    raise zero_opt.OutOfMemory("no room")


@pytest.mark.parametrize("name", OFFLOADS)
def test_training_goes_on_as_if_it_had_not_been_tried(name: str, tmp_path: Path) -> None:
    tried, not_tried = (run_processes(2, _run, name, tmp_path, fails) for fails in (True, False))
    assert_bitwise(tried, not_tried)
