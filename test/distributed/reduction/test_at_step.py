"""Gradients that are reduced at step(): also those that a CUDA graph's replay has written, which raises no version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.support.harness import assert_bitwise, run_threads

NUMELS = (300, 64, 1)
BUCKET_MB = 1024 / 2**20
STEPS = 3
MASTERS = {"precision": zero_opt.MixedPrecision(torch.float32)}
# Below the norm of any gradient here.
MAX_NORM = 0.5

Optimizer = zero_opt.ShardedOptimizer


def _gradients(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


def _made(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[list[Tensor], Optimizer]:
    params: list[Tensor] = [torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for numel in NUMELS]
    for param in params:
        param.grad = torch.zeros_like(param)
    reduction = zero_opt.AtStep(BUCKET_MB)
    return params, Optimizer(params, torch.optim.SGD, lr=0.25, momentum=0.9, reduction=reduction, **options)


def _in_place(param: Tensor, grad: Tensor) -> None:
    assert param.grad is not None
    param.grad.copy_(grad)


def _as_a_replay(param: Tensor, grad: Tensor) -> None:
    assert param.grad is not None
    before = param.grad._version
    param.grad.data.copy_(grad)
    assert param.grad._version == before


def _train(rank: int, world_size: int, write: Callable[[Tensor, Tensor], None], clips: bool, options: Any) -> Any:
    """Take steps without zero_grad(): gradients stay where a graph writes them."""
    params, optimizer = _made(**options)
    for step in range(STEPS):
        for param, grad in zip(params, _gradients(step, rank), strict=True):
            write(param, grad)
        if clips:
            optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
    optimizer.close()
    return [param.detach() for param in params]


@pytest.mark.parametrize("options", [{}, {"offload": zero_opt.CPUOffload()}, {"max_grad_norm": MAX_NORM}], ids=str)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_step_reduces_what_is_there(world_size: int, clips: bool, options: dict[str, Any]) -> None:
    found = run_threads(world_size, _train, _as_a_replay, clips, options)
    assert_bitwise(found, run_threads(world_size, _train, _in_place, clips, options))


def _add_after_clip(rank: int, world_size: int, added: bool) -> list[Tensor]:
    params, optimizer = _made()
    late = torch.nn.Parameter(torch.ones(3))
    if not added:
        optimizer.add_param_group({"params": [late]})
    for param, grad in zip(params, _gradients(0, rank), strict=True):
        _in_place(param, grad)
    optimizer.clip_grad_norm_(MAX_NORM)
    if added:
        optimizer.add_param_group({"params": [late]})
    optimizer.step()
    late.grad = torch.full_like(late, 1.0 + rank)
    optimizer.step()
    optimizer.close()
    return [param.detach() for param in (*params, late)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_group_may_be_added_between_clipping_and_the_step(world_size: int) -> None:
    assert_bitwise(run_threads(world_size, _add_after_clip, True), run_threads(world_size, _add_after_clip, False))
