"""What is left of a window that one rank has given up, where a collective of one rank is answered by another's next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.accelerator import C, enable, unavailable
from test.accelerator.runner import BACKEND, DEVICE
from test.distributed.harness import run_processes

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

SECONDS = 600  # nothing hangs
NUMELS = (704, 320, 512)
BUCKET_MB = 2 / 1024


def _made(rank: int, **options: Any) -> tuple[list[Tensor], zero_opt.ShardedOptimizer]:
    """Make an optimizer over several buckets on a device of the rank's own."""
    enable()
    torch.accelerator.set_device_index(rank)
    params = [torch.nn.Parameter(torch.zeros(numel, device=torch.device(DEVICE, rank))) for numel in NUMELS]
    reduction = zero_opt.Overlapped(BUCKET_MB)
    return list(params), zero_opt.ShardedOptimizer(
        params, torch.optim.SGD, lr=1.0, foreach=False, reduction=reduction, **options
    )


def _backward(params: list[Tensor], value: float) -> None:
    torch.autograd.backward(params, [torch.full_like(param, value) for param in params])


def _values(params: list[Tensor]) -> set[float]:
    assert C.races() == []
    return {value for param in params for value in param.detach().cpu().tolist()}


def _fails_first(rank: int, world_size: int, steps: int) -> set[float]:
    """Rank 1 leaves a forward, so it has launched nothing; both drop the window with one zero_grad()."""
    params, optimizer = _made(rank)
    for _ in range(steps):
        _backward(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        _backward(params, 100.0)
    optimizer.zero_grad()
    _backward(params, 4.0)
    optimizer.step()
    optimizer.close()
    return _values(params)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("backend", [BACKEND, "gloo"])
def test_a_window_of_one_rank_alone_leaves_nothing(backend: str, steps: int) -> None:
    assert run_processes(2, _fails_first, steps, backend=backend, timeout=SECONDS) == [{-4.0 - steps}] * 2


def _leaves(rank: int, world_size: int, offload: Any, again: bool) -> set[float]:
    """State leaves the device, for the second time, while collectives of a dropped window wait for the other rank's."""
    params, optimizer = _made(rank, offload=offload)
    for _ in range(2):
        _backward(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.offload_state()
    optimizer.reload_state()
    if rank == 0:
        _backward(params, 100.0)
    optimizer.zero_grad()
    if again:
        _backward(params, 4.0)
    optimizer.offload_state()
    mine = [torch.zeros(numel // world_size, device=param.device) for numel, param in zip(NUMELS, params, strict=True)]
    optimizer.reload_state()
    if not again:
        _backward(params, 4.0)
    optimizer.step()
    optimizer.close()
    assert _values(mine) == {0.0}
    return _values(params)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload()])
def test_state_leaves_after_a_window_of_one_rank_alone(offload: Any, again: bool) -> None:
    assert run_processes(2, _leaves, offload, again, backend=BACKEND, timeout=SECONDS) == [{-6.0}] * 2


def _drops_on_two_devices(rank: int, world_size: int) -> int:
    """Gradients are dropped by model.zero_grad(); autograd's thread of each device brings new ones."""
    enable()
    torch.accelerator.set_device_index(rank)
    devices = [torch.device(DEVICE, index) for index in range(2)]
    params = [torch.nn.Parameter(torch.ones(64, device=devices[index % 2])) for index in range(40)]
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.SGD, lr=0.25, foreach=False, reduction=zero_opt.Overlapped(BUCKET_MB)
    )
    steps = 40
    for step in range(steps):
        sums = [torch.zeros((), device=device) for device in devices]
        for index, param in enumerate(params):
            if (index + step + rank) % 4:  # some are unused on some ranks
                sums[index % 2] = sums[index % 2] + param.sum()
        (sums[0] + sums[1].to(devices[0])).backward()
        optimizer.step()
        for param in params:
            param.grad = None
    optimizer.close()
    assert C.races() == []
    return steps


def test_gradients_that_another_thread_has_brought_do_not_hide_a_drop() -> None:
    assert run_processes(2, _drops_on_two_devices, backend=BACKEND, timeout=SECONDS) == [40, 40]
