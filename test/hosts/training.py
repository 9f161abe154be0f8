"""A small model that ranks of several hosts train, or as many ranks of this one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_opt
from test.hosts.network import Network
from test.support.harness import run_processes

Layout = tuple[int, ...]  # how many ranks each host has

STEPS = 6
PATIENCE_S = 300.0
_BUCKET_MB = 0.02  # small, so that there are many


def _nothing(_: int) -> None:
    """Disturb nothing."""


@dataclass
class Trained:
    """What training came to on one rank.

    Attributes:
        exchange: the class of the exchange that was chosen.
        params: their values in the end.
    """

    exchange: str
    params: list[Tensor]


def host_of(rank: int, layout: Layout) -> int:
    """The host of a rank."""
    return next(host for host in range(len(layout)) if rank < sum(layout[: host + 1]))


def connect(rank: int, network: Network, layout: Layout, timeout_s: float = 2 * PATIENCE_S) -> None:
    """Join a host, and make a process group whose store is on host 0."""
    network.join(host_of(rank, layout))
    address, timeout = f"tcp://{network.addresses[0]}:29500", timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=sum(layout), timeout=timeout)


def train(rank: int, before_step: Callable[[int], None] = _nothing, *, late: bool = False) -> Trained:
    """Train on data of this rank's own; ``late`` gathers parameters in the background."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 130), nn.ReLU(), nn.LayerNorm(130), nn.Linear(130, 65), nn.Linear(65, 3))
    reduction = zero_opt.Overlapped(_BUCKET_MB, overlap_param_gather=model if late else None)
    optimizer: Any = zero_opt.ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, reduction=reduction, max_grad_norm=0.5, fused=True
    )
    data = torch.Generator().manual_seed(100 + rank)
    for step in range(STEPS):
        before_step(step)
        model(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    exchange = type(optimizer._engine.parts.exchanges["cpu"]).__name__
    params = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return Trained(exchange, params)


def _train_on_one_host(rank: int, world_size: int) -> Trained:
    return train(rank)


@functools.cache
def trained_on_one_host(world_size: int) -> Trained:
    """What as many ranks of one host come to, all the same."""
    return run_processes(world_size, _train_on_one_host)[0]  # type: ignore[no-any-return]
