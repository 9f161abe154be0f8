"""ShardedOptimizer on one GPU: NCCL at world size 1, two gloo ranks sharing the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zero_opt
from test.support.harness import assert_bitwise, run_processes


def gradient(step: int, rank: int, param: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(step * 97 + rank * 11 + param.numel())
    return torch.randn(param.shape, generator=generator).to(param.device, param.dtype)


def make_params(device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(33, 9), (65,), (1000,), (), (7, 64)]
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in sizes]


def train(rank: int, world_size: int, policy: zero_opt.Overlapped | zero_opt.AtStep, streams: int) -> list[Tensor]:
    params = make_params("cuda")
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=policy, lr=0.1, foreach=False)
    side = [torch.cuda.Stream() for _ in range(streams)]
    for step in range(6):
        terms = []
        for i, param in enumerate(params):
            if side:
                with torch.cuda.stream(side[i % streams]):
                    terms.append((param * gradient(step, rank, param)).sum())
            else:
                terms.append((param * gradient(step, rank, param)).sum())
        torch.cuda.synchronize()
        torch.stack(terms).sum().backward()
        opt.step()
        opt.zero_grad()
    torch.cuda.synchronize()
    opt.close()
    return [p.detach().cpu() for p in params]


def oracle(world_size: int) -> list[Tensor]:
    params = make_params("cuda")
    opt = torch.optim.AdamW(params, lr=0.1, foreach=False)
    for step in range(6):
        for param in params:
            total = gradient(step, 0, param)
            for rank in range(1, world_size):
                total = total + gradient(step, rank, param)
            param.grad = total / world_size
        opt.step()
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("streams", [0, 2], ids=["one stream", "two producer streams"])
@pytest.mark.parametrize("policy", [zero_opt.Overlapped(bucket_mb=0.002), zero_opt.AtStep(bucket_mb=0.002)], ids=repr)
def test_two_gloo_ranks_on_one_device(policy: zero_opt.Overlapped | zero_opt.AtStep, streams: int) -> None:
    expected = run_processes(1, lambda rank, world_size: oracle(2))[0]
    for params in run_processes(2, train, policy, streams):
        assert_bitwise(params, expected)


def alone(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    return train(rank, world_size, zero_opt.Overlapped(), 0), oracle(1)


def test_nccl_at_world_size_1() -> None:
    ours, plain = run_processes(1, alone, backend="nccl")[0]
    assert_bitwise(ours, plain)


def pull_and_consolidate(rank: int, world_size: int) -> object:
    params = make_params("cuda")
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for step in range(3):
            torch.stack([(param * gradient(step, rank, param)).sum() for param in params]).sum().backward()
            opt.step()
            opt.zero_grad()
        pulled = opt.state_dict() if rank == 0 else None
        opt.consolidate_state_dict(to=0)
    brought = opt.state_dict() if rank == 0 else None
    opt.close()
    return pulled, brought


def test_state_on_a_device_is_pulled_once_its_step_is_over() -> None:
    pulled, brought = run_processes(2, pull_and_consolidate)[0]
    assert_bitwise(pulled, brought)
