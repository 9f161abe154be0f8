"""fp32 masters of bf16 and fp16 parameters, on the device and in host memory: the bits of a run on fp32 parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.distributed.harness import assert_bitwise, run_processes
from test.distributed.scenario import BUCKET_MB, values

SECONDS = 30  # nothing hangs
SHAPES = ((130, 7), (65,), (), (0, 3), (300,), (1000,))
STEPS = 5
OVERLAPPED = zero_opt.Overlapped(BUCKET_MB)
MASTERS = zero_opt.MixedPrecision(master_dtype=torch.float32)
SPLIT = zero_opt.MixedPrecision(master_dtype="split")
ON_DEVICE: dict[str, Any] = {"precision": MASTERS}
ON_HOST: dict[str, Any] = {"offload": zero_opt.CPUOffload()}
HALVES = (torch.bfloat16, torch.float16)
# With an fp32 reference of the same formula.
CLASSES: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "fused": (torch.optim.AdamW, {"fused": True}, zero_opt.CPUAdamW, {}),
    "native": (zero_opt.CPUAdam, {"amsgrad": True}, zero_opt.CPUAdam, {"amsgrad": True}),
    "loop": (torch.optim.Adam, {"fused": False, "foreach": False}, torch.optim.Adam, {"foreach": False}),
    "foreach": (torch.optim.Adam, {"foreach": True}, torch.optim.Adam, {"foreach": True}),
    "made at once": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, torch.optim.Adagrad, {}),
    "whole": (torch.optim.Muon, {}, torch.optim.Muon, {}),
}


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
    """After one step the user writes to a part of one parameter."""
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


def simulate(world_size: int, cls: Any, dtype: torch.dtype, scale: float = 1.0, **options: Any) -> Any:
    """The same by the class on fp32 parameters, from which those of ``dtype`` are cast."""
    params = make_params(cls, dtype)
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = cls(masters, lr=0.02, **options)
    seen = []
    for step in range(STEPS):
        for at, master in enumerate(masters):
            master.grad = None
            if (step + at) % 3:
                total = sum(gradient(params, step, rank, at).float() for rank in range(world_size))
                master.grad = (torch.as_tensor(total) / world_size).to(dtype).float().mul_(scale)
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master)
        seen.append([param.detach().clone() for param in params])
        edit(params, step)
        if step == 2:
            masters[0].data.view(-1)[3:200] = params[0].detach().float().view(-1)[3:200]
    return seen, optimizer.state_dict()["state"], masters


def assert_as_simulated(runs: Any, simulated: Any) -> None:
    """Parameters of all ranks after every step, the state, and masters in it that nothing has rounded."""
    seen, state, masters = simulated
    for rank, (found, _) in enumerate(runs):
        assert_bitwise(found, seen, f"rank {rank}")
    for index, entry in runs[0][1]["state"].items():
        assert_bitwise(entry.pop("master"), masters[index].detach(), f"master {index}")
        assert_bitwise(entry, state[index], f"state {index}")


@pytest.mark.parametrize("where", [ON_DEVICE, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("name", CLASSES)
def test_bits_of_fp32_parameters_that_are_cast(name: str, where: dict[str, Any]) -> None:
    """Parameters unused now and then, one that the user writes to."""
    cls, options, reference, own = CLASSES[name]
    if name == "made at once":
        own = options
    for world_size, dtype in ((1, torch.bfloat16), (2, torch.float16), (2, torch.bfloat16)):
        runs = run_processes(world_size, lambda r, w: train(r, w, cls, dtype, **options, **where), timeout=SECONDS)
        assert_as_simulated(runs, simulate(world_size, reference, dtype, **own))
