"""One process that steps as one of a thousand ranks, over torch's group of ranks that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.harness import run_processes

WORLD_SIZE, RANK = 1024, 3
POLICIES: tuple[dict[str, Any], ...] = (
    {"reduction": zero_opt.Overlapped()},
    {"reduction": zero_opt.AtStep()},
    {"reduction": zero_opt.AlreadyReduced()},
    {"offload": zero_opt.CPUOffload()},
    {"max_grad_norm": 1.0},
)


def _steps(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of state before and after steps."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=RANK, world_size=WORLD_SIZE, store=FakeStore())
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 64))
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True, **options)
    before = optimizer.memory_report()["state"]
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.consolidate_state_dict() is None  # that is rank 0's
    after = optimizer.memory_report()["state"]
    optimizer.close()
    dist.destroy_process_group()
    return before, after


@pytest.mark.parametrize("options", POLICIES, ids=str)
def test_one_of_many_ranks_steps_its_part(options: dict[str, Any]) -> None:
    [(_, state)] = run_processes(1, _steps, options, backend=None)
    numel = 64 * 1024 * 2 + 1024 + 64
    assert 0 < state < 16 * numel // WORLD_SIZE
