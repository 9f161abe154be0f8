"""A graph keeps what it has saved of parameters, where torch is asked for that, although steps overwrite them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

import zero_opt
from test.support.harness import run_processes

# Options of an optimizer of the model.
WAYS: dict[str, Callable[[nn.Module, str], dict[str, Any]]] = {
    "at step": lambda model, folder: {"reduction": zero_opt.AtStep()},
    "overlapped": lambda model, folder: {},
    "late": lambda model, folder: {"reduction": zero_opt.Overlapped(overlap_param_gather=model)},
    "worker": lambda model, folder: {"offload": zero_opt.WorkerOffload()},
    "delayed": lambda model, folder: {"offload": zero_opt.WorkerOffload(delay=1)},
    "nvme": lambda model, folder: {"offload": zero_opt.NVMeOffload(folder)},
}


def _trained(make: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    """Take two forwards, then a backward and a step of each; the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = make(model)
    with allow_mutation_on_saved_tensors():
        for loss in [model(torch.randn(4, 16)).square().mean() for _ in range(2)]:
            loss.backward()
            optimizer.step()
            if isinstance(optimizer, zero_opt.ShardedOptimizer):
                optimizer.flush()
            optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def _differing(rank: int, world_size: int, folder: str, cls: Any, options: dict[str, Any]) -> list[str]:
    """Return the ways that do not train to the bits of the class by itself."""
    expected = _trained(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    found = {
        way: _trained(
            lambda model, made=made: zero_opt.ShardedOptimizer(  # type: ignore[misc]
                model.parameters(), cls, lr=0.01, **options, **made(model, folder)
            )
        )
        for way, made in WAYS.items()
    }
    found["by itself"] = _trained(lambda model: cls(model.parameters(), lr=0.01, **options))
    return [way for way, params in found.items() if not all(map(torch.equal, params, expected))]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("cls", "options"), [(torch.optim.AdamW, {"fused": True}), (zero_opt.CPUAdamW, {})], ids=["torch", "native"]
)
def test_a_backward_after_a_step_sees_the_parameters_of_its_forward(
    tmp_path: Any, world_size: int, cls: Any, options: dict[str, Any]
) -> None:
    assert run_processes(world_size, _differing, str(tmp_path), cls, options) == [[]] * world_size
