"""Training over a worker, by ranks and by one plain optimizer that applies a gradient as many steps later."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise
from test.support.late_params import as_they_are
from test.support.scenario import OVERLAPPED, mean, values
from zero_opt.placement.worker import process

SHAPES = ((130, 7), (65,), (1000,), ())
NOW, LATER = zero_opt.WorkerOffload(), zero_opt.WorkerOffload(delay=1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NATIVE = {torch.optim.Adam: zero_opt.CPUAdam, torch.optim.AdamW: zero_opt.CPUAdamW}
LRS = (0.03, 0.01, 0.002)


@contextmanager
def stillborn_workers(folder: Path) -> Iterator[None]:
    """Within the context, every worker that starts kills itself at once."""
    program = folder / "stillborn.py"
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_MAIN", program)
        yield


def end_workers(patch: pytest.MonkeyPatch, optimizer: zero_opt.ShardedOptimizer) -> None:
    """End the optimizer's worker; while the patch lasts none can be started."""
    patch.setattr(process, "_MAIN", process._MAIN.with_name("missing.py"))
    os.kill(worker_of(optimizer)._handles.child.pid, signal.SIGKILL)


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(values(31, 0, 0, index, shape).to(dtype, copy=True)) for index, shape in enumerate(SHAPES)]


def make(params: Any, cls: Any = torch.optim.AdamW, **options: Any) -> zero_opt.ShardedOptimizer:
    """Over a worker, in small buckets, unless asked otherwise."""
    options = {"offload": NOW, "reduction": OVERLAPPED, "fused": True, **options}
    return zero_opt.ShardedOptimizer(params, cls, **options)


def worker_of(optimizer: zero_opt.ShardedOptimizer) -> Any:
    engine: Any = optimizer._engine
    return engine.placement._worker


def used_in(step: int) -> list[int]:
    """Some parameter is unused in every third step."""
    return [index for index in range(len(SHAPES)) if step % 3 or index != step % len(SHAPES)]


@as_they_are
def gradient(step: int, rank: int, index: int, param: Tensor) -> Tensor:
    """It depends on where the parameter is, so that a result that lands at another time shows."""
    return (values(step, 1, rank, index, SHAPES[index]) + 0.5 * param.detach().float()).to(param.dtype)


def backward(params: list[nn.Parameter], step: int, rank: int) -> None:
    used = [index for index in used_in(step) if index < len(params)]
    torch.autograd.backward([params[i] for i in used], [gradient(step, rank, i, params[i]) for i in used])


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range, rank: int = 0) -> None:
    """Take these steps."""
    for step in steps:
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()


@as_they_are
def values_of(params: list[nn.Parameter]) -> list[Tensor]:
    """Copies of parameters."""
    return [param.detach().clone() for param in params]


def mean_grads(params: list[nn.Parameter], step: int, world_size: int) -> list[Tensor | None]:
    """The mean over ranks, rounded once."""
    means: list[Tensor | None] = [None] * len(params)
    for index in used_in(step):
        means[index] = mean([gradient(step, rank, index, params[index]) for rank in range(world_size)])
    return means


@as_they_are
def train_ranks(
    rank: int,
    world_size: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    meanwhile: Callable[[zero_opt.ShardedOptimizer, int, int], None] | None = None,
    **options: Any,
) -> Any:
    """One rank's parameters after every step and at the end, its state then, and what became of workers."""
    params = make_params(dtype)
    optimizer = make(params, **options)
    seen = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LRS[step % len(LRS)]
        optimizer.zero_grad()
        backward(params, step, rank)
        if meanwhile is not None:
            meanwhile(optimizer, step, rank)
        optimizer.step()
        seen.append([param.detach().clone() for param in params])
    optimizer.consolidate_state_dict()
    seen.append([param.detach().clone() for param in params])
    state = optimizer.state_dict()["state"] if rank == 0 else None
    deaths = worker_of(optimizer).deaths
    optimizer.close()
    return seen, state, deaths


def simulate(
    world_size: int,
    steps: int,
    delay: int,
    dtype: torch.dtype = torch.float32,
    cls: Any = zero_opt.CPUAdamW,
    **options: Any,
) -> Any:
    """The same by one plain optimizer that applies, at a step, the gradient and lr of ``delay`` steps before."""
    params = make_params(dtype)
    optimizer = cls(params, state=zero_opt.AdamState(master="float32"), **options)
    waiting: list[tuple[list[Tensor | None], float]] = []
    seen = []
    for step in range(steps + delay):
        if step < steps:
            waiting.append((mean_grads(params, step, world_size), LRS[step % len(LRS)]))
        if len(waiting) > delay or step >= steps:
            grads, optimizer.param_groups[0]["lr"] = waiting.pop(0)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
        seen.append([param.detach().clone() for param in params])
    return [*seen, seen[-1]] if not delay else seen, optimizer.state_dict()["state"]


def assert_as_simulated(found: Any, simulated: Any) -> None:
    for rank, (seen, state, _) in enumerate(found):
        assert_bitwise(seen, simulated[0], f"rank {rank}")
        if rank == 0:
            assert_bitwise(state, simulated[1], "state")
