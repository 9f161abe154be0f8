"""What a step allocates, and what memory_report says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zero_opt
from test.support.harness import run_processes

# Messages about the step itself: masks, idents, and the norm of each piece, a few bytes each.
_BOOKKEEPING_BYTES = 4096


def step_allocations(rank: int, world_size: int, policy: Any) -> tuple[int, dict[str, int], int]:
    params = [torch.nn.Parameter(torch.ones(size)) for size in (300_000, 1000, 200_000, 64)]
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=True, reduction=policy, max_grad_norm=1.0)
    for step in range(3):
        torch.stack([(param * (step + 1)).sum() for param in params]).sum().backward()
        if step == 2:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
                opt.step()
        else:
            opt.step()
        opt.zero_grad()
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in recorded.events())
    report = opt.memory_report()
    opt.close()
    return allocated, report, sum(param.numel() for param in params)


@pytest.mark.parametrize("exchange", ["auto", "backend"])
@pytest.mark.parametrize("make", [zero_opt.AtStep, zero_opt.Overlapped])
def test_a_step_allocates_nothing_after_the_first(make: Any, exchange: str) -> None:
    for allocated, report, numel in run_processes(2, step_allocations, make(bucket_mb=0.5, exchange=exchange)):
        assert allocated <= _BOOKKEEPING_BYTES
        assert numel * 4 / 2 <= report["grad_shards"] <= numel * 4 / 2 * 1.01
        assert numel * 8 / 2 * 0.99 <= report["state"] <= numel * 8 / 2 * 1.01
        if exchange == "backend":  # each bucket is one run, which messages need no staging for
            assert report["staging"] == 0
        else:  # two of the largest bucket
            assert 0 < report["staging"] <= 2 * 300_032 * 4 + 3 * 4096
