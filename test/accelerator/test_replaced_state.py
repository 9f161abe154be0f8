"""State that the user has replaced by tensors on another device, which is stepped where the placement keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.accelerator import C, assert_no_races, enable, unavailable
from test.accelerator.runner import BACKEND, DEVICE
from test.support.harness import assert_bitwise, run_processes

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

SHAPES = ((64, 64), (32, 48), (40,))
SELECTIVE = zero_opt.Selective(topk_ratio=0.25, update_interval=2)


def _options(name: str, folder: Path) -> dict[str, Any]:
    offloads: dict[str, Any] = {
        "ratio": zero_opt.CPUOffload(ratio=0.4),
        "cpu": zero_opt.CPUOffload(),
        "cpu, class": zero_opt.CPUOffload(),
        "selective": zero_opt.CPUOffload(selective=SELECTIVE),
        "worker": zero_opt.WorkerOffload(),
        "nvme": zero_opt.NVMeOffload(folder),
    }
    if name in ("whole", "numbers", "momentum"):
        return {}
    if name in offloads:
        by_class = name in ("ratio", "cpu, class")
        return {"offload": offloads[name], "fused": not by_class, "foreach": False if by_class else None}
    precision = zero_opt.MixedPrecision(torch.float32 if name == "masters" else None)
    return {"precision": precision, "foreach": name == "foreach"}


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "whole": (torch.optim.Adafactor, {}),
    "numbers": (torch.optim.NAdam, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
}
IN_HOST_MEMORY = ("cpu", "cpu, class", "selective", "worker", "nvme")
HALVES = ("masters", "cpu", "worker", "nvme")
WITHOUT_PLACEMENT = ("device", "foreach", "whole", "numbers", "momentum")  # at world size 1
NAMES = (*WITHOUT_PLACEMENT, "masters", "ratio", "cpu", "cpu, class", "selective", "worker", "nvme")


def _edited(value: Tensor, other: torch.device | None) -> Any:
    """Half a tensor, or a copy of a number: on ``other`` or, from an accelerator, on the CPU; else where it is."""
    half = value.detach() * 0.5 if value.dim() and value.is_floating_point() else value.detach().clone()
    return half if other is None else half.to(other if value.is_cpu else "cpu")


def _edit(optimizer: Any, param: Tensor, other: torch.device | None, how: str, numbers: bool) -> None:
    state = optimizer.state.get(param)
    if not state:
        return
    tensors = {key: value for key, value in state.items() if key != "master" and isinstance(value, Tensor)}
    edited = {key: _edited(value, other) for key, value in tensors.items() if value.dim() or numbers}
    if how == "tensors":
        for key, value in edited.items():
            state[key] = value
        return
    optimizer.state[param] = {**state, **edited}


def _train(name: str, how: str, device: torch.device, other: torch.device | None, folder: Path) -> list[Tensor]:
    dtype = torch.bfloat16 if name in HALVES else torch.float32
    params = [nn.Parameter(torch.linspace(-1, 1, 64 * 64)[: torch.Size(s).numel()].view(s).to(dtype)) for s in SHAPES]
    params = [nn.Parameter(param.detach().to(device)) for param in params]
    cls, hypers = CLASSES.get(name, (torch.optim.AdamW, {}))
    optimizer = zero_opt.ShardedOptimizer(params, cls, lr=0.1, **hypers, **_options(name, folder))
    for step in range(5):
        sum(((param * param).float().sum() for param in params), start=torch.zeros((), device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and how == "offloaded":
            optimizer.offload_state()
        if step == 1:
            for param in params[:2]:
                _edit(optimizer, param, other, "entries" if how == "offloaded" else how, name in IN_HOST_MEMORY)
        if step == 1 and how == "offloaded":
            optimizer.reload_state()
    found = [param.detach().cpu() for param in params]
    C.synchronize()
    optimizer.close()
    return found


def _compare(rank: int, world_size: int, name: str, how: str, folder: Path) -> None:
    enable()
    torch.accelerator.set_device_index(rank)
    accelerator = torch.device(DEVICE, rank)
    for device in (accelerator, torch.device("cpu")):
        expected = _train(name, how, device, None, folder)
        assert_bitwise(_train(name, how, device, accelerator, folder), expected, str(device))
    assert_no_races()


@pytest.mark.parametrize("how", ["entries", "tensors", "offloaded"])
@pytest.mark.parametrize(
    ("world_size", "name"),
    [(size, name) for name in NAMES for size in (1, 2) if size == 2 or name not in WITHOUT_PLACEMENT],
)
def test_it_is_stepped_where_the_placement_keeps_it(world_size: int, name: str, how: str, tmp_path: Path) -> None:
    run_processes(world_size, _compare, name, how, tmp_path, backend=BACKEND)
