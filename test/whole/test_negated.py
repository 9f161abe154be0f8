"""Gradients and state that are views by ``conj()``, or the ``imag`` of one: torch negates what is in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_opt
from test.support.harness import assert_bitwise, run_processes

SHAPES = ((30, 7), (65,), (5,))
FP32, BF16, COMPLEX = torch.float32, torch.bfloat16, torch.complex64
SELECTIVE = zero_opt.CPUOffload(selective=zero_opt.Selective(0.5, update_interval=2))
LOOKING = zero_opt.Checks(nonfinite="raise")
CASES: dict[str, tuple[torch.dtype, Any, dict[str, Any]]] = {
    "overlapped": (FP32, torch.optim.AdamW, {}),
    "complex": (COMPLEX, torch.optim.AdamW, {}),
    "at step": (FP32, torch.optim.AdamW, {"reduction": zero_opt.AtStep(exchange="backend")}),
    "reduced before": (FP32, torch.optim.AdamW, {"reduction": zero_opt.AlreadyReduced()}),
    "masters": (BF16, torch.optim.AdamW, {"precision": zero_opt.MixedPrecision(master_dtype=FP32)}),
    "CPUAdamW": (BF16, zero_opt.CPUAdamW, {"precision": zero_opt.MixedPrecision(master_dtype=FP32)}),
    "CPUOffload": (FP32, zero_opt.CPUAdamW, {"offload": zero_opt.CPUOffload()}),
    "WorkerOffload": (BF16, zero_opt.CPUAdamW, {"offload": zero_opt.WorkerOffload(threads=1)}),
    "NVMeOffload": (FP32, zero_opt.CPUAdamW, {}),
    "clipped": (FP32, torch.optim.AdamW, {"reduction": zero_opt.AlreadyReduced(), "max_grad_norm": 0.5}),
    "complex, reduced before": (COMPLEX, torch.optim.AdamW, {"reduction": zero_opt.AlreadyReduced()}),
    "complex, clipped": (COMPLEX, torch.optim.SGD, {"reduction": zero_opt.AlreadyReduced(), "max_grad_norm": 0.5}),
    "complex, looked at": (COMPLEX, torch.optim.SGD, {"reduction": zero_opt.AlreadyReduced(), "checks": LOOKING}),
    "complex, clipped by a call": (COMPLEX, torch.optim.AdamW, {"reduction": zero_opt.AlreadyReduced()}),
    "selective": (FP32, zero_opt.CPUAdamW, {"offload": SELECTIVE}),
}


def _negated(value: Any) -> Any:
    """The same values, with the opposite in memory where that can be: its conjugate of a complex tensor."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    negated = torch._conj(value.conj().resolve_conj()) if value.is_complex() else torch._neg_view(-value)
    assert negated.is_conj() or negated.is_neg()
    return negated


def _train(rank: int, world_size: int, name: str, negates: bool, folder: Path) -> list[Any]:
    dtype, cls, policies = CASES[name]
    shown = _negated if negates else lambda value: value
    generator, norms = torch.Generator().manual_seed(1), list[Tensor]()
    already = isinstance(policies.get("reduction"), zero_opt.AlreadyReduced)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    if name == "NVMeOffload":
        policies = {"offload": zero_opt.NVMeOffload(folder)}
    opt = zero_opt.ShardedOptimizer(params, cls, lr=0.1, **policies)
    generator.manual_seed(2 if already else 2 + rank)
    for number in range(4):
        grads = [shown(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
        if already:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        else:
            torch.autograd.backward(params, grads)
        if name == "complex, clipped by a call":
            norms.append(opt.clip_grad_norm_(0.5))
        opt.step()
        opt.zero_grad()
        if number == 1:
            state = opt.state_dict()
            entries = {i: {key: shown(value) for key, value in entry.items()} for i, entry in state["state"].items()}
            opt.load_state_dict({**state, "state": entries})
    found = [*norms, *(param.detach() for param in params), opt.state_dict()["state"]]
    opt.close()
    return found


@pytest.mark.sampled(10, always="complex,")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_negated_gradients_and_state_are_their_values(name: str, world_size: int, tmp_path: Path) -> None:
    plain, negated = (run_processes(world_size, _train, name, negates, tmp_path) for negates in (False, True))
    assert_bitwise(negated, plain)
