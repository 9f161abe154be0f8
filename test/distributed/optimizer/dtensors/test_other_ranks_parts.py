"""State saved as DTensors, loaded by another rank than the one that has saved it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_opt
from test.support.harness import run_processes
from zero_opt import ShardedOptimizer, StateDictError

Save = Callable[[ShardedOptimizer], Any]
Load = Callable[[ShardedOptimizer, Any], None]


def _trained(mesh_shape: tuple[int, ...] | None, offload: Any) -> tuple[nn.Linear, ShardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    if mesh_shape is not None:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, offload=offload)
    for _ in range(2):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _rank_0_s(saved: Any) -> Any:
    """What rank 0 has saved, read from its file."""
    file = io.BytesIO()
    torch.save(saved, file)
    sent = [file.getvalue()]
    dist.broadcast_object_list(sent, src=0)
    return torch.load(io.BytesIO(sent[0]), weights_only=True)


def _load_that_of_rank_0(
    rank: int, world_size: int, save: Save, load: Load, mesh_shape: tuple[int, ...] | None, offload: Any
) -> str:
    """What the load says, or that it has loaded this rank's own state."""
    model, optimizer = _trained(mesh_shape, offload)
    saved = _rank_0_s(save(optimizer))
    other, fresh = _trained(mesh_shape, offload)
    try:
        load(fresh, saved)
    except StateDictError as error:
        return str(error)
    for param, loaded in zip(model.parameters(), other.parameters(), strict=True):
        pair = [opt.state[p]["exp_avg"] for opt, p in ((optimizer, param), (fresh, loaded))]
        assert torch.equal(*[value.to_local() for value in pair])
    return "loaded"


def _plain_load(optimizer: ShardedOptimizer, saved: Any) -> None:
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload(threads=1)])
def test_the_part_of_another_rank_is_refused(offload: Any) -> None:
    said = run_processes(2, _load_that_of_rank_0, ShardedOptimizer.state_dict, _plain_load, (2,), offload)
    assert said[0] == "loaded"
    assert "the part of rank 0 of a mesh of 2, and this is rank 1" in said[1]


def test_rows_of_another_rank_are_refused_on_all() -> None:
    said = run_processes(
        2, _load_that_of_rank_0, zero_opt.sharded_state_dict, zero_opt.load_sharded_state_dict, None, None
    )
    assert all("the part of rank 0 of a mesh of 2, and this is rank 1" in text for text in said)


def test_a_part_that_two_ranks_have_alike_is_loaded() -> None:
    assert run_processes(2, _load_that_of_rank_0, ShardedOptimizer.state_dict, _plain_load, (2, 1), None) == [
        "loaded",
        "loaded",
    ]
