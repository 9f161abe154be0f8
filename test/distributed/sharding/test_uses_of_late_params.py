"""Every way to read or to change parameters between step() and the next forward: as without overlap."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.late_results import slowly
from test.support.uses_of_params import ONES, READS, WRITES, Model, values_of
from zero_opt import WorkerOffload
from zero_opt.sharding.gather import ParamGather

WAYS = {**READS, **WRITES}


def _late_gathers(patch: pytest.MonkeyPatch) -> None:
    """Let a use that does not wait find an old parameter."""
    gather = ParamGather._gather

    def late(self: ParamGather, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return gather(self, *arguments, **options)

    patch.setattr(ParamGather, "_gather", late)
    slowly(patch)


def _optimizer(model: Model, overlap: bool, offload: Any) -> zero_opt.ShardedOptimizer:
    reduction = zero_opt.Overlapped(bucket_mb=0.0005, overlap_param_gather=model if overlap else None)
    return zero_opt.ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.05, fused=True, reduction=reduction, offload=offload
    )


def _use(rank: int, world_size: int, overlap: bool, offload: Any) -> dict[str, Any]:
    """What each way gives, and the parameters at the end of it."""
    _late_gathers(pytest.MonkeyPatch())
    found = {}
    model = Model()
    optimizer = _optimizer(model, overlap, offload)
    for name, way in WAYS.items():
        model(ONES * (rank + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen = values_of(way(model))
        optimizer.flush()
        found[name] = [None if name in WRITES else seen, values_of(list(model.parameters()))]
    optimizer.close()
    return found


@pytest.mark.parametrize(("world_size", "offload"), [(2, None), (1, WorkerOffload())])
def test_a_use_waits_for_what_is_on_its_way(world_size: int, offload: Any) -> None:
    within, late = (run_processes(world_size, _use, overlap, offload) for overlap in (False, True))
    for name in WAYS:
        for rank in range(world_size):
            assert_bitwise(late[rank][name], within[rank][name], f"{name}, rank {rank}")
            assert_bitwise(late[rank][name][1], late[0][name][1], f"{name}, ranks differ")
