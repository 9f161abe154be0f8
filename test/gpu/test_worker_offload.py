"""WorkerOffload with parameters on one GPU: the bits of CPUAdamW given the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_opt
from test.gpu.params import gradients, params_on
from test.gpu.processes import forked
from test.support.failures import PATIENCE_S
from zero_opt.system.waiting import until


def _beside_reference(
    dtype: torch.dtype, offload: zero_opt.WorkerOffload
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter], zero_opt.ShardedOptimizer, torch.optim.Optimizer]:
    """Parameters on the GPU and the same on the CPU, and an optimizer of each."""
    ours, plain = params_on("cuda", dtype), params_on("cpu", dtype)
    opt = zero_opt.ShardedOptimizer(ours, torch.optim.AdamW, offload=offload, lr=0.01, fused=True)
    reference = zero_opt.CPUAdamW(plain, lr=0.01, state=zero_opt.AdamState(master="float32"))
    return ours, plain, opt, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("delay", [0, 1])
@forked
def test_bits_of_cpu_adamw(delay: int, dtype: torch.dtype) -> None:
    ours, plain, opt, reference = _beside_reference(dtype, zero_opt.WorkerOffload(delay=delay))
    for step in range(10):
        grads = gradients(step, dtype)
        torch.autograd.backward(ours, [grad.cuda() for grad in grads])
        for param, grad in zip(plain, grads, strict=True):
            param.grad = grad.clone()
        opt.step()
        opt.zero_grad()
        reference.step()
    opt.flush()
    assert all(torch.equal(a.detach().cpu(), b.detach()) for a, b in zip(ours, plain, strict=True))
    opt.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forked
def test_steps_begin_during_backward(dtype: torch.dtype) -> None:
    ours, plain, opt, reference = _beside_reference(dtype, zero_opt.WorkerOffload(speculate=True))
    placed: Any = opt._engine.placement  # type: ignore[union-attr]
    for step in range(5):
        grads = gradients(step, dtype)
        torch.autograd.backward(ours, [grad.cuda() for grad in grads])
        for param, grad in zip(plain, grads, strict=True):
            param.grad = grad.clone()
        assert step == 0 or until(lambda: bool(placed._drafts), PATIENCE_S)  # the first looks at the parameters
        opt.step()
        opt.zero_grad()
        reference.step()
    assert all(torch.equal(a.detach().cpu(), b.detach()) for a, b in zip(ours, plain, strict=True))
    assert opt.stats()["worker/drafts_kept"] >= 4
    opt.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delay", [0, 1])
@forked
def test_gradients_are_copied_during_backward(delay: int, dtype: torch.dtype) -> None:
    ours, plain, opt, reference = _beside_reference(dtype, zero_opt.WorkerOffload(delay=delay))
    placed: Any = opt._engine.placement  # type: ignore[union-attr]
    for step in range(5):
        grads = gradients(step, dtype)
        torch.autograd.backward(ours, [grad.cuda() for grad in grads])
        torch.cuda.synchronize()
        for shard in placed._shards.values():
            assert torch.equal(shard.grads, shard.bucket.shard.cpu())
            shard.grads.mul_(0.5)  # what step() copied again would not be halved
        for param, grad in zip(plain, grads, strict=True):
            param.grad = grad * 0.5
        opt.step()
        opt.zero_grad()
        reference.step()
    opt.flush()
    assert all(torch.equal(a.detach().cpu(), b.detach()) for a, b in zip(ours, plain, strict=True))
    opt.close()


@forked
def test_memory_that_grows_is_locked_anew() -> None:
    opt = zero_opt.ShardedOptimizer(
        params_on("cuda", torch.float32), torch.optim.AdamW, offload=zero_opt.WorkerOffload(), fused=True, lr=0.1
    )
    added = params_on("cuda", torch.bfloat16)
    opt.add_param_group({"params": added})
    torch.autograd.backward(added, [grad.cuda() for grad in gradients(0, torch.bfloat16)])
    before = [param.detach().clone() for param in added]
    opt.step()
    torch.cuda.synchronize()
    assert not any(torch.equal(a, b) for a, b in zip(before, added, strict=True) if a.numel())
    opt.close()
