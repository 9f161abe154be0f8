"""A load that one rank cannot end: all ranks hear of it, and no step is taken until a load succeeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.harness import run_processes
from test.support.stepped import make_stepped, take_step


def _half_loaded(rank: int, world_size: int) -> list[float]:
    """A load that fails on rank 1 once it has begun to write is refused by the next step, until one succeeds."""
    params, optimizer = make_stepped(2)
    optimizer.consolidate_state_dict()
    saved = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved, 0)
    take_step(params, optimizer)
    before = [param.detach().clone() for param in params]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(type(optimizer._engine.placement), "load", _fails)
        with pytest.raises(zero_opt.StorageFailed, match="no disk"):
            optimizer.load_state_dict(saved[0])
    with pytest.raises(
        zero_opt.StateDictError, match=r"load_state_dict.. has ended with an error .* load a checkpoint"
    ):
        take_step(params, optimizer)
    assert all(map(torch.equal, params, before))
    optimizer.zero_grad()
    optimizer.load_state_dict(saved[0])
    take_step(params, optimizer)
    step = float(optimizer.state_dict()["state"][0]["step"].item())
    dist.barrier()
    optimizer.close()
    return [step]


def _fails(*_: Any) -> None:
    raise zero_opt.StorageFailed("no disk")


def test_no_step_is_taken_after_a_load_that_was_left_half_way() -> None:
    assert run_processes(2, _half_loaded) == [[3.0], [3.0]]
