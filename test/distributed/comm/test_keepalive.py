"""Limits on connections leave the process's sockets as their owners have made them."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

import zero_opt
from test.support.harness import run_processes


def _trained(rank: int, world_size: int) -> tuple[list[float], bool]:
    """Train after ``socket.setdefaulttimeout()``; return the parameter, and whether an older socket still blocks."""
    mine, _other = socket.socketpair()
    socket.setdefaulttimeout(30.0)
    layer = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    zero_opt.broadcast_params(layer)
    optimizer = zero_opt.ShardedOptimizer(layer.parameters(), torch.optim.SGD, lr=0.5)
    layer(torch.full((1, 3), rank + 1.0)).sum().backward()
    optimizer.step()
    optimizer.close()
    return layer.weight.flatten().tolist(), os.get_blocking(mine.fileno())


def test_a_default_timeout_of_sockets_changes_none_that_are_there() -> None:
    found: list[Any] = run_processes(2, _trained)
    assert found == [([0.25] * 3, True)] * 2
