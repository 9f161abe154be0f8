"""Parameters sharded by ``fully_shard``: the bits of torch's optimizers, wherever the shard lives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import zero_opt
from test.distributed.fsdp_models import (
    BF16,
    FP32,
    backward,
    groups_of,
    local_state,
    locals_of,
    mesh_of,
    ours,
    set_lr,
    sharded,
)
from test.distributed.harness import assert_bitwise, run_processes

SECONDS = 60  # nothing hangs
STEPS = 5
WORKER, LATER = zero_opt.WorkerOffload(), zero_opt.WorkerOffload(delay=1)
MESHES = {"uneven": (2,), "three": (3,), "replicas": (2, 2)}


def _trained(net: Any, optimizer: Any, rank: int, *, clip: bool) -> list[Any]:
    """This rank's parameters after every step; torch's function clips."""
    seen = []
    for step in range(STEPS):
        set_lr(optimizer, step)
        optimizer.zero_grad()
        backward(net, step, rank)
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        seen.append(locals_of(net.parameters()))
    return seen


def _steps_as_torch(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(shape)
    for policy in (FP32, BF16):
        net = sharded(mesh, policy)
        plain = torch.optim.AdamW(groups_of(net), lr=0.02, fused=True)
        expected, state = _trained(net, plain, rank, clip=True), local_state(plain)
        for offload in (None, WORKER):
            net = sharded(mesh, policy)
            optimizer = ours(net, offload=offload)
            assert_bitwise(_trained(net, optimizer, rank, clip=True), expected, f"{policy}, {offload}")
            assert_bitwise(local_state(optimizer), state, f"state, {policy}, {offload}")
            optimizer.close()


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_steps_are_those_of_torch(shape: tuple[int, ...]) -> None:
    """Groups that differ, a schedule, clipping, frozen and unused parameters, parts that are uneven or empty."""
    run_processes(torch.Size(shape).numel(), _steps_as_torch, shape, timeout=SECONDS)
