"""NCCL at world size 1, and at 2 with a GPU per rank: what the cases of test/accelerator do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_opt
from test.gpu.processes import NCCL, nccl_ranks, own_gpu, two_gpus
from test.support.device_cases.places import on_host
from test.support.harness import assert_bitwise, run_processes

BUCKET_MB = 2048 / 2**20
SIZES = (700, 64, 300, 200, 500)
ADAMW = (torch.optim.AdamW, {"lr": 0.1, "foreach": False})
# It steps whole parameters, each on one rank.
ADAFACTOR = (torch.optim.Adafactor, {"lr": 0.1, "foreach": False})
POLICIES = [
    zero_opt.Overlapped(BUCKET_MB),
    zero_opt.AtStep(BUCKET_MB),
    zero_opt.Overlapped(BUCKET_MB, exchange="backend"),
]


def make_params(device: torch.device, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(numel, device=device, dtype=dtype)) for numel in SIZES]


def gradients(step: int, rank: int, params: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return [torch.randn(param.shape, generator=generator).to(param) for param in params]


def sgd(params: Any, **options: Any) -> zero_opt.ShardedOptimizer:
    options = {"reduction": zero_opt.Overlapped(BUCKET_MB), "lr": 0.25, "momentum": 0.9, **options}
    return zero_opt.ShardedOptimizer(params, torch.optim.SGD, foreach=False, **options)


def backward(params: Any, value: float) -> None:
    torch.autograd.backward(list(params), [torch.full_like(param, value) for param in params])


def beside_the_plain_class(rank: int, world_size: int, policy: Any, kind: Any) -> Any:
    device = own_gpu(rank)
    cls, arguments = kind
    ours, plain = make_params(device), make_params(device)
    optimizer = zero_opt.ShardedOptimizer(ours, cls, reduction=policy, **arguments)
    reference = cls(plain, **arguments)
    for step in range(6):
        torch.autograd.backward(ours, gradients(step, rank, ours))
        optimizer.step()
        optimizer.zero_grad()
        of_ranks = [gradients(step, other, plain) for other in range(world_size)]
        for param, *grads in zip(plain, *of_ranks, strict=True):
            param.grad = torch.stack(grads).sum(0) / world_size
        reference.step()
    found = on_host([ours, plain])
    optimizer.close()
    return found


@nccl_ranks
@pytest.mark.parametrize("kind", [ADAMW, ADAFACTOR], ids=["AdamW", "Adafactor"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_bits_of_the_plain_class(policy: Any, kind: Any, world_size: int) -> None:
    for ours, plain in run_processes(world_size, beside_the_plain_class, policy, kind, backend=NCCL):
        assert_bitwise(ours, plain)


def asks_first(rank: int, world_size: int) -> Any:
    """Rank 0 asks for the state before it takes part in a collective that rank 1 has launched."""
    device = own_gpu(rank)
    params = make_params(device)
    optimizer = sgd(params)
    backward(params, 1.0 + rank)
    optimizer.step()
    optimizer.zero_grad()
    mine = torch.ones(8, device=device)
    dist.barrier(group=dist.new_group(backend="gloo"))
    state = optimizer.state_dict()["state"] if rank == 0 else None
    dist.all_reduce(mine)
    found = on_host([state, mine])
    optimizer.close()
    return found


@two_gpus
def test_one_rank_asks_for_the_state_while_the_other_is_in_a_collective() -> None:
    (state, mine), _ = run_processes(2, asks_first, backend=NCCL)
    assert_bitwise(mine, torch.full((8,), 2.0))
    assert_bitwise([float(entry["momentum_buffer"][0]) for entry in state.values()], [1.5] * len(SIZES))


def closes_alone(rank: int, world_size: int) -> str:
    """Rank 0 launches what rank 1 never does, and closes one optimizer, and lets go of another."""
    params = make_params(own_gpu(rank))
    optimizer, dropped = sgd(params), sgd(make_params(own_gpu(rank)))
    backward(params, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        backward(params, 2.0)
        optimizer.close()
        del dropped
    dist.barrier(group=dist.new_group(backend="gloo"))
    if rank == 1:
        optimizer.close()
        dropped.close()
    return "closed"


@two_gpus
def test_a_rank_that_closes_alone_waits_for_nobody() -> None:
    assert run_processes(2, closes_alone, backend=NCCL) == ["closed"] * 2


def goes_on_after_a_failure(rank: int, world_size: int) -> list[Tensor]:
    """The backward of the last rank fails after a few buckets; all call zero_grad() and go on."""
    params = make_params(own_gpu(rank))
    optimizer = sgd(params)
    some = params if rank < world_size - 1 else params[2:]
    for step in range(3):
        backward(some, 5.0)
        optimizer.zero_grad()
        backward(params, 1.0 + rank + step)
        optimizer.step()
        optimizer.zero_grad()
    found: list[Tensor] = on_host(params)
    optimizer.close()
    return found


def as_if_nothing_had_failed(rank: int, of_ranks: int) -> list[Tensor]:
    plain = make_params(torch.device("cpu"))
    reference = torch.optim.SGD(plain, lr=0.25, momentum=0.9, foreach=False)
    for step in range(3):
        backward(plain, 1.0 + (of_ranks - 1) / 2 + step)
        reference.step()
        reference.zero_grad()
    return on_host(plain)


@nccl_ranks
def test_a_window_that_was_dropped_leaves_nothing(world_size: int) -> None:
    first, *others = run_processes(world_size, goes_on_after_a_failure, backend=NCCL)
    assert_bitwise(others, [first] * (world_size - 1))
    # A backward here, on the CPU too, would begin to use CUDA, and no test after it could fork ranks that do.
    (plain,) = run_processes(1, lambda rank, _: as_if_nothing_had_failed(rank, world_size), backend=None)
    for ours, theirs in zip(first, plain, strict=True):
        torch.testing.assert_close(ours, theirs.detach())


def large_mean(rank: int, world_size: int, reduction: Any) -> list[Tensor]:
    params = make_params(own_gpu(rank), torch.float16)
    optimizer = sgd(params, reduction=reduction, lr=2.0**-15, momentum=0.0)
    backward(params, 49152.0)
    optimizer.step()
    found: list[Tensor] = on_host(params)
    optimizer.close()
    return found


@nccl_ranks
@pytest.mark.parametrize("reduction", POLICIES[:2], ids=repr)
def test_a_mean_in_fp16_whose_sum_would_overflow(reduction: Any, world_size: int) -> None:
    for values in run_processes(world_size, large_mean, reduction, backend=NCCL):
        for value in values:
            assert_bitwise(value, torch.full_like(value, -0.5))


def late_parameters(rank: int, world_size: int, offload: Any, late: bool) -> list[Tensor]:
    """Train linear layers whose parameters arrive before their forward, or within step()."""
    torch.manual_seed(1)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).to(own_gpu(rank))
    reduction = zero_opt.Overlapped(BUCKET_MB, overlap_param_gather=layers if late else None)
    optimizer = zero_opt.ShardedOptimizer(
        layers.parameters(), torch.optim.AdamW, reduction=reduction, offload=offload, fused=True
    )
    for step in range(5):
        inputs = torch.full((8, 64), 0.1 * (1 + rank + step), device=own_gpu(rank))
        layers(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    found: list[Tensor] = on_host(list(layers.parameters()))
    optimizer.close()
    return found


@nccl_ranks
@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload(threads=1)], ids=repr)
def test_parameters_that_arrive_late_have_the_same_bits(offload: Any, world_size: int) -> None:
    late = run_processes(world_size, late_parameters, offload, True, backend=NCCL)
    assert_bitwise(late, run_processes(world_size, late_parameters, offload, False, backend=NCCL))


def scaled(rank: int, world_size: int) -> Any:
    """Train under GradScaler; in the third step the gradients of the last rank overflow."""
    params = make_params(own_gpu(rank))
    optimizer = sgd(params)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for step in range(4):
        loss = torch.stack([(param * (1.0 + rank)).sum() for param in params]).sum()
        if step == 2 and rank == world_size - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = [scaler.get_scale(), on_host(params)]
    optimizer.close()
    return found


@nccl_ranks
def test_grad_scaler_skips_the_step_of_all_ranks(world_size: int) -> None:
    answers = run_processes(world_size, scaled, backend=NCCL)
    mean = 1.0 + (world_size - 1) / 2
    for scale, params in answers:
        assert scale == 2.0**9
        # Three steps with lr 0.25 and momentum 0.9: 1 + 1.9 + 2.71 gradients.
        for param in params:
            torch.testing.assert_close(param, torch.full_like(param, 1.0 - 0.25 * 5.61 * mean))


def contexts(rank: int, world_size: int, offload: Any, late: bool) -> list[bool]:
    late_parameters(rank, world_size, offload, late)
    count = torch.cuda.device_count()
    return [torch._C._cuda_hasPrimaryContext(index) for index in range(count)]


@two_gpus
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload(threads=1)], ids=repr)
@pytest.mark.parametrize("backend", [NCCL, "gloo"], ids=["NCCL", "relay"])
def test_a_rank_has_a_context_on_its_own_gpu_alone(backend: str, offload: Any, late: bool) -> None:
    for rank, found in enumerate(run_processes(2, contexts, offload, late, backend=backend)):
        assert [index for index, made in enumerate(found) if made] == [rank]
