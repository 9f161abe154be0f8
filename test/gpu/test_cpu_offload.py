"""CPUOffload, masters and offload_state() with parameters on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_opt
from test.gpu.params import gradients, params_on
from test.gpu.processes import forked

OFFLOADS = [
    zero_opt.CPUOffload(),
    zero_opt.CPUOffload(pin_memory=False),
    zero_opt.CPUOffload(subgroup_mb=0.01),
]


def _train(params: Any, optimizer: Any, steps: int, device: str) -> None:
    for step in range(steps):
        torch.autograd.backward(params, [grad.to(device) for grad in gradients(step, params[0].dtype)])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offload", OFFLOADS)
@forked
def test_bits_of_cpu_adamw(offload: zero_opt.CPUOffload, dtype: torch.dtype) -> None:
    ours, plain = params_on("cuda", dtype), params_on("cpu", dtype)
    opt = zero_opt.ShardedOptimizer(ours, torch.optim.AdamW, offload=offload, lr=0.01, fused=True)
    reference = zero_opt.CPUAdamW(plain, lr=0.01, state=zero_opt.AdamState(master="float32"))
    _train(ours, opt, 10, "cuda")
    _train(plain, reference, 10, "cpu")
    assert all(torch.equal(a.detach().cpu(), b.detach()) for a, b in zip(ours, plain, strict=True))
    for param in ours:
        assert all(not value.is_cuda for value in opt.state[param].values())
    opt.close()


@pytest.mark.parametrize("fused", [True, False])
@forked
def test_a_part_stays_on_the_gpu(fused: bool) -> None:
    """What stays is stepped by the class there, whose roundings are the GPU's own."""
    ours, plain = params_on("cuda", torch.bfloat16), params_on("cpu", torch.bfloat16)
    opt = zero_opt.ShardedOptimizer(
        ours, torch.optim.AdamW, offload=zero_opt.CPUOffload(ratio=0.5), lr=0.01, fused=fused
    )
    reference = zero_opt.CPUAdamW(plain, lr=0.01, state=zero_opt.AdamState(master="float32"))
    _train(ours, opt, 10, "cuda")
    _train(plain, reference, 10, "cpu")
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach())
    assert {value.device.type for param in ours for value in opt.state[param].values()} == {"cpu", "cuda"}
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    again = opt.state_dict()
    for index, state in saved["state"].items():
        assert all(torch.equal(again["state"][index][key], value) for key, value in state.items())
    opt.close()


@pytest.mark.parametrize("options", [{}, {"precision": zero_opt.MixedPrecision(torch.float32)}])
@forked
def test_offload_state_gives_the_gpu_its_memory(options: dict[str, Any]) -> None:
    """12 bytes per element with masters and fp32 moments, 4 without, and the gradients' two."""
    numel, dtype = 4 << 20, torch.bfloat16
    params = [torch.nn.Parameter(torch.randn(numel, device="cuda").to(dtype)) for _ in range(2)]
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=True, lr=0.01, **options)
    grads = [torch.randn(numel, device="cuda").to(dtype) for _ in params]
    torch.autograd.backward(params, [grad.clone() for grad in grads])
    opt.step()
    opt.zero_grad()
    shown = [dict(opt.state[param]) for param in params]
    values = [{key: value.cpu() for key, value in state.items()} for state in shown]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    opt.offload_state()
    assert before - torch.cuda.memory_allocated() >= 2 * numel * (14 if options else 4)
    with pytest.raises(zero_opt.StateOffloaded):
        opt.step()
    opt.reload_state()
    assert torch.cuda.memory_allocated() <= before
    for param, state, value in zip(params, shown, values, strict=True):
        assert all(opt.state[param][key] is tensor for key, tensor in state.items())
        assert all(torch.equal(state[key].cpu(), tensor) for key, tensor in value.items())
    torch.autograd.backward(params, grads)
    opt.step()
    opt.close()


@forked
def test_no_fp32_copy_is_on_the_gpu() -> None:
    numel = 8 << 20
    params = [torch.nn.Parameter(torch.zeros(numel // 4, device="cuda", dtype=torch.bfloat16)) for _ in range(4)]
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, fused=True, offload=zero_opt.CPUOffload(subgroup_mb=2))
    torch.autograd.backward(params, [torch.ones_like(param) for param in params])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    opt.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < numel
    opt.close()
