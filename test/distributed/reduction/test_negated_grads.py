"""Gradients with torch's negative bit: what lies in their memory has the other sign."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.scenario import BUCKET_MB

REDUCTIONS = {
    "Overlapped": zero_opt.Overlapped(BUCKET_MB),
    "Overlapped, backend": zero_opt.Overlapped(BUCKET_MB, exchange="backend"),
    "AtStep": zero_opt.AtStep(BUCKET_MB),
    "AtStep, backend": zero_opt.AtStep(BUCKET_MB, exchange="backend"),
    "AlreadyReduced": zero_opt.AlreadyReduced(),
}


class _Negates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch._neg_view(grads[0])


def _train(make: Any) -> tuple[list[torch.Tensor], list[bool]]:
    real, imaginary, many = (
        nn.Parameter(torch.linspace(1, 2, n).view(s)) for n, s in ((1, ()), (1, ()), (600, (20, 30)))
    )
    optimizer, seen = make([real, imaginary, many]), list[bool]()
    many.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.is_neg()))
    imaginary.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.is_neg()))
    for _ in range(3):
        conjugate = torch.complex(real, imaginary).conj()
        ((conjugate * (1 + 2j)).real + _Negates.apply(many).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in (real, imaginary, many)], seen


def _beside_torch(rank: int, world_size: int, reduction: Any) -> Any:
    plain = _train(lambda params: torch.optim.SGD(params, lr=0.1))
    return plain, _train(lambda params: zero_opt.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, reduction=reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_they_are_what_torch_reads(reduction: str) -> None:
    for (plain, seen), (found, _) in run_processes(2, _beside_torch, REDUCTIONS[reduction]):
        assert any(seen)
        assert_bitwise(found, plain)
