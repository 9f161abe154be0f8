"""NVMeOffload with parameters on one GPU: the bits of CPUAdamW given the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zero_opt
from test.gpu.params import gradients, params_on
from test.gpu.processes import forked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@forked
def test_bits_of_cpu_adamw(dtype: torch.dtype, tmp_path: Path) -> None:
    ours, plain = params_on("cuda", dtype), params_on("cpu", dtype)
    offload = zero_opt.NVMeOffload(tmp_path, window_mb=0.1)
    opt = zero_opt.ShardedOptimizer(ours, torch.optim.AdamW, offload=offload, lr=0.01, fused=True)
    reference = zero_opt.CPUAdamW(plain, lr=0.01, state=zero_opt.AdamState(master="float32"))
    for step in range(6):
        grads = gradients(step, dtype)
        torch.autograd.backward(ours, [grad.cuda() for grad in grads])
        for param, grad in zip(plain, grads, strict=True):
            param.grad = grad.clone()
        opt.step()
        opt.zero_grad()
        reference.step()
    assert all(torch.equal(a.detach().cpu(), b.detach()) for a, b in zip(ours, plain, strict=True))
    opt.close()
