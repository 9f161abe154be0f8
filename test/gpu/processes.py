"""Processes for tests on a GPU: each test has its own, because a process that has used CUDA cannot fork others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from test.support.harness import run_processes

# NCCL for tensors on a GPU, gloo for those in host memory.
NCCL = "cpu:gloo,cuda:nccl"
# Of one test: CUDA and NCCL take seconds to start.
SECONDS = 120.0

two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU per rank, here are fewer than two"
)
# How many ranks, each on a GPU of its own.
nccl_ranks = pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=two_gpus)])


def forked(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own, without a process group."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_processes(1, lambda rank, world_size: test(**arguments), backend=None, timeout=SECONDS)

    return run


def own_gpu(rank: int) -> torch.device:
    """Make the GPU with the rank's number the current one."""
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
