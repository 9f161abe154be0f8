"""Selective: the bits of a straightforward reference, wherever parameters are cut and whatever is selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.distributed.harness import assert_bitwise, run_processes, run_threads
from test.distributed.scenario import values
from test.distributed.selective_reference import Reference
from zero_opt import CPUOffload, NVMeOffload, Selective, WorkerOffload

SECONDS = 60  # nothing hangs
SHAPES = ((130, 7), (65,), (), (40, 30), (3, 5, 7, 2), (0, 3), (24, 50), (2, 200), (64, 1))
TRANSPOSED = 6
LAST = 4
STEPS = 23
REDUCTION = zero_opt.Overlapped(4096 / 2**20)
POLICIES = {
    "some": Selective(0.3, select_interval=6, update_interval=3),
    "warm-up": Selective(0.1, select_interval=1, update_interval=2, warmup_steps=5),
    "auto": Selective(0.5, select_interval=5, update_interval="auto"),
    "none": Selective(0.0, select_interval=3, update_interval=4),
    "all": Selective(1.0, update_interval=4),
}
EACH = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    params = []
    for index, shape in enumerate(SHAPES):
        value = values(31, 0, 0, index, shape).to(dtype, copy=True)
        if index == TRANSPOSED:
            value = value.t().contiguous().t()
        elif index == LAST:
            value = value.contiguous(memory_format=torch.channels_last)
        params.append(nn.Parameter(value))
    return params


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:3], "lr": 0.01},
        {"params": params[3:5], "lr": 0.03, "weight_decay": 0.2},
        {"params": params[5:], "lr": 0.002},
    ]


def gradient(step: int, rank: int, index: int, param: Tensor) -> Tensor | None:
    """Unused now and then; columns differ in size, and others are large later; and it depends on the parameter."""
    if (step + index) % 5 == 0:
        return None
    found = values(step, 1, rank, index, SHAPES[index])
    if found.dim() >= 2:
        columns = torch.arange(found.shape[-1])
        found = found * (1 + 3 * ((columns * 7 + step // 4) % 5 == 0))
    return (found + 0.25 * param.detach().float()).to(param.dtype)


def set_means(params: list[nn.Parameter], step: int, world_size: int) -> None:
    for index, param in enumerate(params):
        grads = [gradient(step, rank, index, param) for rank in range(world_size)]
        param.grad = None
        if grads[0] is not None:
            total = grads[0].float()
            for grad in grads[1:]:
                assert grad is not None
                total = total + grad.float()
            param.grad = (total / world_size).to(param.dtype)


def backward(params: list[nn.Parameter], step: int, rank: int) -> None:
    found = [(param, gradient(step, rank, index, param)) for index, param in enumerate(params)]
    used = [(param, grad) for param, grad in found if grad is not None]
    torch.autograd.backward([param for param, _ in used], [grad for _, grad in used])


def set_lr(groups: list[dict[str, Any]], step: int) -> None:
    for number, group in enumerate(groups):
        group["lr"] = 0.01 * (number + 1) / (1 + step % 4)


def train(
    rank: int,
    world_size: int,
    offload: Any,
    dtype: torch.dtype = torch.float32,
    steps: range = range(STEPS),
    saved: Any = None,
    **options: Any,
) -> tuple[list[list[Tensor]], Any, Any]:
    """Parameters after every step and at the end; the state dict; ``saved`` are parameters and a state dict to resume."""
    params = make_params(dtype)
    optimizer = zero_opt.ShardedOptimizer(
        groups_of(params), torch.optim.AdamW, reduction=REDUCTION, offload=offload, fused=True, **options
    )
    if saved is not None:
        with torch.no_grad():
            for param, value in zip(params, saved[0], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(saved[1])
    seen = []
    for step in steps:
        set_lr(optimizer.param_groups, step)
        optimizer.zero_grad()
        backward(params, step, rank)
        optimizer.step()
        seen.append([param.detach().clone() for param in params])
    optimizer.consolidate_state_dict()
    seen.append([param.detach().clone() for param in params])
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return seen, None if state is None else state["state"], state


def simulate(world_size: int, policy: Selective, delay: int, dtype: torch.dtype) -> Any:
    params = make_params(dtype)
    reference = Reference(groups_of(params), policy, delay)
    seen = []
    for step in range(STEPS):
        set_lr(reference.groups, step)
        set_means(params, step, world_size)
        reference.step()
        seen.append([param.detach().clone() for param in params])
    reference.flush()
    seen.append([param.detach().clone() for param in params])
    return seen, reference.state()


def assert_as_simulated(found: Any, simulated: Any) -> None:
    for step, (ours, theirs) in enumerate(zip(found[0], simulated[0], strict=True)):
        assert_bitwise(ours, theirs, f"after step {step}")
    if found[1] is not None:
        assert found[1].keys() == simulated[1].keys()
        for index, state in simulated[1].items():
            assert_bitwise({key: found[1][index][key] for key in state}, state, f"state of {index}")


@EACH
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_as_the_reference_in_process(policy: Selective, world_size: int) -> None:
    """Over threads, with parameters cut between ranks anywhere."""
    simulated = simulate(world_size, policy, 0, torch.float32)
    for found in run_threads(world_size, train, CPUOffload(selective=policy), timeout=SECONDS):
        assert_as_simulated(found, simulated)
