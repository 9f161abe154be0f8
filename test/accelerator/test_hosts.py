"""Ranks of several hosts that have accelerators, with a backend of collectives between them."""

from __future__ import annotations

import pytest
import torch

import zero_opt
from test.accelerator import enable, unavailable
from test.accelerator.runner import BACKEND, DEVICE
from test.support.harness import run_processes

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def _refused(rank: int, world_size: int) -> str:
    enable()
    torch.accelerator.set_device_index(rank)
    param = torch.nn.Parameter(torch.zeros(64, device=DEVICE))
    precision = zero_opt.MixedPrecision(between_hosts_dtype=torch.bfloat16)
    with pytest.raises(zero_opt.ConfigConflict) as caught:
        zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=1.0, precision=precision)
    return str(caught.value)


def test_a_backends_collectives_do_not_round_between_hosts() -> None:
    first, second = run_processes(2, _refused, backend=BACKEND)
    assert "backend for sim" in first and first == second
