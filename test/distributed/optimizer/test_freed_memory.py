"""What gradients leave is there for the next ones: a step touches no new pages."""

from __future__ import annotations

import resource
from functools import partial

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import run_processes

MATRICES, WIDTH = 32, 1024  # of 4 MiB each


def _faults_per_step(rank: int, world_size: int, reduction: str) -> float:
    """Pages that a rank has touched for the first time, per step, once it has made a few."""
    torch.set_num_threads(1)
    params = [nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(MATRICES)]
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, fused=True, offload=zero_opt.CPUOffload(), reduction=getattr(zero_opt, reduction)()
    )
    counts = []
    for _ in range(8):
        torch.stack([param.mean() for param in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    optimizer.close()
    return (counts[-1] - counts[3]) / 4


@pytest.mark.parametrize("reduction", ["Overlapped", "AtStep"])
def test_gradients_are_made_where_others_were(reduction: str) -> None:
    """Of the 64 matrices of two ranks, glibc still gives a block or two back to the system."""
    pages = 4.5 * WIDTH * WIDTH * 4 / resource.getpagesize()
    assert sum(run_processes(2, partial(_faults_per_step, reduction=reduction))) < pages
