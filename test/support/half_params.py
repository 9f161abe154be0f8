"""Parameters of bf16 and fp16, and their training by ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zero_opt
from test.support.scenario import OVERLAPPED, values

SHAPES = ((130, 7), (65,), (), (0, 3), (300,), (1000,))
STEPS = 5
HALVES = (torch.bfloat16, torch.float16)


def shapes_of(cls: Any) -> tuple[tuple[int, ...], ...]:
    return ((33, 9), (7, 64), (12, 5)) if cls is torch.optim.Muon else SHAPES


def make_params(cls: Any, dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(values(41, 0, 0, at, shape).to(dtype, copy=True)) for at, shape in enumerate(shapes_of(cls))]


def backward(params: list[nn.Parameter], step: int, rank: int) -> None:
    used = [at for at in range(len(params)) if (step + at) % 3]
    torch.autograd.backward([params[at] for at in used], [gradient(params, step, rank, at) for at in used])


def gradient(params: list[nn.Parameter], step: int, rank: int, at: int) -> Tensor:
    return values(step, 2, rank, at, tuple(params[at].shape)).to(params[at].dtype)


def edit(params: list[nn.Parameter], step: int) -> None:
    """Write to a part of the first parameter after step 2, as a user may."""
    if step == 2:
        with torch.no_grad():
            params[0].view(-1)[3:200].mul_(0.5)


def train(rank: int, world_size: int, cls: Any, dtype: torch.dtype, steps: int = STEPS, **options: Any) -> Any:
    """Parameters after every step, and the state at the end."""
    params = make_params(cls, dtype)
    optimizer = zero_opt.ShardedOptimizer(params, cls, **{"reduction": OVERLAPPED, "lr": 0.02, **options})
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
        seen.append([param.detach().clone() for param in params])
        edit(params, step)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return seen, state
