"""What gradients leave is there for the next ones: a step touches no new pages."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import run_processes

MATRICES, WIDTH = 32, 1024  # of 4 MiB each
STEPS = 40


def _new_pages(rank: int, world_size: int, reduction: str) -> int:
    """Pages that a rank touches for the first time in STEPS steps, once it has made one."""
    torch.set_num_threads(1)
    params = [nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(MATRICES)]
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, fused=True, offload=zero_opt.CPUOffload(), reduction=getattr(zero_opt, reduction)()
    )
    counts = []
    for _ in range(1 + STEPS):
        activation = torch.ones(8, WIDTH)
        for param in params:
            activation = torch.tanh(activation @ param)
        activation.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    optimizer.close()
    return counts[-1] - counts[0]


def pages_of_two_ranks(reduction: str) -> None:
    """Print the more that one of two ranks touches."""
    print(max(run_processes(2, partial(_new_pages, reduction=reduction))))


@pytest.mark.parametrize("reduction", ["Overlapped", "AtStep"])
def test_gradients_are_made_where_others_were(reduction: str) -> None:
    """The heap grows, once, to the most gradients that are alive at a time, which timing decides.

    In an interpreter of its own: ranks forked from one with a large heap touch the free pages in it for the first time.
    """
    grads_pages = MATRICES * WIDTH * WIDTH * 4 // resource.getpagesize()
    code = f"from {__name__} import pages_of_two_ranks; pages_of_two_ranks({reduction!r})"
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert int(ended.stdout) < 2 * grads_pages
