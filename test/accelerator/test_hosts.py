"""Ranks of several hosts that have accelerators, with a backend of collectives between them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zero_opt
from test.accelerator import C, assert_no_races, enable, unavailable
from test.accelerator.runner import BACKEND, DEVICE, Plan, wrong_lines
from test.support.harness import run_processes
from test.support.sampling import long_form

LONG = long_form("ACCELERATOR")
SEEDS, CHUNK, SECONDS = tuple(range(12 if LONG else 1)), 8, 3600 if LONG else 900  # nothing hangs
pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def _refused(rank: int, world_size: int) -> str:
    enable()
    torch.accelerator.set_device_index(rank)
    param = torch.nn.Parameter(torch.zeros(64, device=DEVICE))
    precision = zero_opt.MixedPrecision(between_hosts_dtype=torch.bfloat16)
    with pytest.raises(zero_opt.ConfigConflict) as caught:
        zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=1.0, precision=precision)
    return str(caught.value)


def test_a_backends_collectives_do_not_round_between_hosts() -> None:
    first, second = run_processes(2, _refused, backend=BACKEND)
    assert "backend for sim" in first and first == second


# Two hosts of two ranks add up in tree order, and their halves are exact: the bits are those of the CPU.
CASES = (
    "device, Overlapped, float32",
    "device, AtStep, float32",
    "device, DDPHook, float32",
    "accumulating no_sync, Overlapped",
    "accumulating each reduced, AtStep",
    "accumulating in fp32, Overlapped",
    "clipped before the step, Overlapped",
    "clipped in the step, device",
    "whole parameters, Muon",
    "whole parameters, SGD of the user's",
    "complex",
    "fp64",
    "other strides, gathered late",
    "gathered late, Overlapped",
    "gathered late, accumulating",
    "failed backward",
    "failed everywhere",
    "state leaves, device",
    "one rank asks, device",
    "resharded, device",
    "two optimizers",
    "gathered late, worker",
)


@pytest.mark.parametrize("first", range(0, len(CASES), CHUNK))
def test_a_mesh_of_two_dimensions_has_the_bits_of_the_cpu_and_no_race(first: int, subtests: pytest.Subtests) -> None:
    wrong = wrong_lines(4, Plan(CASES[first : first + CHUNK], SEEDS, in_turn=True), timeout=SECONDS)
    for name, lines in wrong.items():
        with subtests.test(msg=name):
            assert not lines, "\n".join(lines[:12])


def _exchange(
    rank: int, world_size: int, shape: tuple[int, int], dtype: torch.dtype, cls: Any, reduction: Any, seed: int = 0
) -> Any:
    enable()
    torch.accelerator.set_device_index(rank % 2)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).to(dtype)
    params = [torch.nn.Parameter(torch.zeros(500, device=DEVICE, dtype=dtype)) for _ in range(2)]
    mesh = init_device_mesh("cpu", shape)
    opt: Any = zero_opt.ShardedOptimizer(params, cls, mesh, lr=1.0, foreach=False, reduction=reduction)
    torch.autograd.backward(params, list(values.to(DEVICE).split(500)))
    opt.step()
    exchange = type(opt._engine.parts.exchanges[DEVICE]).__name__
    found = torch.cat([param.detach().cpu() for param in params])
    opt.close()
    assert_no_races()
    return values, found, exchange


def _reduce_and_gather(rank: int, world_size: int, *arguments: Any) -> Any:
    return _exchange(rank, world_size, *arguments, zero_opt.Overlapped(), rank)


class WholeSGD(torch.optim.SGD):
    """A class that is not known to be elementwise, so that shards differ in size."""


def _mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """As a backend does it: scaled, and added from left to right."""
    scaled = [part * (1.0 / len(parts)) for part in parts]
    total = scaled[0].clone()
    for part in scaled[1:]:
        total += part
    return total


@pytest.mark.parametrize("cls", [torch.optim.SGD, WholeSGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3), (4, 1), (1, 4)], ids=str)
def test_a_mean_of_means_of_each_host(shape: tuple[int, int], dtype: torch.dtype, cls: Any) -> None:
    hosts, per_host = shape
    results = run_processes(hosts * per_host, _reduce_and_gather, shape, dtype, cls, backend=BACKEND)
    values = [values for values, _, _ in results]
    staged = min(shape) > 1
    if staged:
        values = [_mean(values[host * per_host : (host + 1) * per_host]) for host in range(hosts)]
    expected = -_mean(values)
    for _, found, exchange in results:
        assert exchange == ("HierarchicalBackendExchange" if staged else "BackendExchange")
        assert torch.equal(found, expected)


@pytest.mark.parametrize("cls", [torch.optim.SGD, WholeSGD])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2)], ids=str)
def test_gradients_that_are_reduced_already_are_taken_as_they_are(shape: tuple[int, int], cls: Any) -> None:
    arguments = (shape, torch.float32, cls, zero_opt.AlreadyReduced())
    for values, found, exchange in run_processes(shape[0] * shape[1], _exchange, *arguments, backend=BACKEND):
        assert exchange == "HierarchicalBackendExchange"
        assert torch.equal(found, -values)


def _close_alone(rank: int, world_size: int) -> None:
    enable()
    torch.accelerator.set_device_index(rank % 2)
    param = torch.nn.Parameter(torch.zeros(500, device=DEVICE))
    opt = zero_opt.ShardedOptimizer([param], torch.optim.SGD, init_device_mesh("cpu", (2, 2)), lr=1.0, foreach=False)
    store = dist.distributed_c10d._get_default_store()
    # At first no buckets are launched before step(), then during backward.
    for _ in range(2):
        param.grad = None
        param.sum().backward()
        opt.step()
        opt.zero_grad()
    if rank == 0:
        param.sum().backward()
        opt.close()
        C.synchronize()
        store.set("closed", "")
    else:
        store.wait(["closed"], timedelta(seconds=60))
        opt.close()


def test_a_rank_may_close_alone_amid_a_reduction() -> None:
    run_processes(4, _close_alone, backend=BACKEND, timeout=120)
