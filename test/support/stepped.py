"""A small optimizer that has taken a few steps, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.scenario import BUCKET_MB


def make(**options: Any) -> tuple[list[nn.Parameter], zero_opt.ShardedOptimizer]:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((130, 7), (65,), (), (1000,))]
    options = {"reduction": zero_opt.Overlapped(BUCKET_MB), "fused": True, **options}
    return params, zero_opt.ShardedOptimizer(params, torch.optim.AdamW, **options)


def take_step(params: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(params, [torch.full_like(param, 0.5) * (1 + i) for i, param in enumerate(params)])
    optimizer.step()


def make_stepped(steps: int = 1, **options: Any) -> tuple[list[nn.Parameter], zero_opt.ShardedOptimizer]:
    params, optimizer = make(**options)
    for _ in range(steps):
        take_step(params, optimizer)
    return params, optimizer


def lost_in(call: Callable[[], object]) -> tuple[str, str]:
    """Return the class and the message of the PeerLost that a call ends with."""
    with pytest.raises(zero_opt.PeerLost) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def service_of(optimizer: Any) -> Any:
    return optimizer._engine._groups.service
