"""What adam.py compares: each contender is a function without arguments that makes one whole step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import zero_opt
from zero_opt.cpu_adam import AdamHypers, AdamUpdate, adam_update_, grad_squares

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
HYPERS = AdamHypers(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)
LOSS_SCALE, MAX_NORM = 1024.0, 1.0
Steps = dict[str, Callable[[], object]]


def random(numel: int) -> Tensor:
    """Numbers of the size that gradients have."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(1e-2)


def deepspeed_adam(param: Parameter) -> Any:
    """DeepSpeedCPUAdam over the param, or None where deepspeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([param], adamw_mode=True, **OPTIONS)


def with_grad(grad: Tensor) -> Parameter:
    """A param of its own for one contender."""
    param = Parameter(random(grad.numel()))
    param.grad = grad
    return param


def fp32_contenders(numel: int, threads: int) -> tuple[Steps, list[Tensor]]:
    """The fp32 steps, and the arrays that each of them reads."""
    grad = random(numel)
    ours = zero_opt.CPUAdamW([with_grad(grad)], threads=threads, **OPTIONS)
    steps: Steps = {
        "torch for-loop": torch.optim.AdamW([with_grad(grad)], foreach=False, **OPTIONS).step,
        "torch foreach": torch.optim.AdamW([with_grad(grad)], foreach=True, **OPTIONS).step,
        "torch fused": torch.optim.AdamW([with_grad(grad)], fused=True, **OPTIONS).step,
    }
    theirs = deepspeed_adam(with_grad(grad))
    if theirs is not None:
        steps["DeepSpeedCPUAdam"] = theirs.step
    steps["zero_opt"] = ours.step
    ours.step()
    param = ours.param_groups[0]["params"][0]
    return steps, [param.detach(), grad, ours.state[param]["exp_avg"], ours.state[param]["exp_avg_sq"]]


def reading(tensors: list[Tensor]) -> Callable[[], object]:
    """Reads every byte once and does as little with it as can be."""
    return lambda: [tensor.sum() for tensor in tensors]


def casting(numel: int) -> Callable[[], object]:
    """bf16 gradient to fp32, torch's fused step, fp32 param to bf16; all memory is allocated beforehand."""
    grad, wide, out = random(numel).bfloat16(), torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
    param = with_grad(wide)
    optimizer = torch.optim.AdamW([param], fused=True, **OPTIONS)

    def step() -> None:
        wide.copy_(grad)
        optimizer.step()
        out.copy_(param.detach())

    return step


FORMS = {
    "one pass": ("float32", "float32"),
    "split master": ("float32", "split"),
    "bf16 moments": ("bfloat16", "float32"),
    "bf16 moments, split master": ("bfloat16", "split"),
    "8-bit moments": ("block8", "float32"),
    "8-bit moments, split master": ("block8", "split"),
}
MOMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "block8": 1 + 2 / 64}


def bytes_moved(moments: str, master: str) -> float:
    """Read and written per element: gradient in, master both ways, moments both ways, param out."""
    return 2 + (8 if master == "float32" else 4) + 4 * MOMENT_BYTES[moments] + (2 if master == "float32" else 4)


def reduced_contenders(numel: int, threads: int) -> tuple[Steps, dict[str, float]]:
    """The steps with a bf16 gradient and param, and the bytes that each moves per element."""
    grad = random(numel).bfloat16()
    steps: Steps = {"cast + torch fused + cast": casting(numel)}
    moved = {"cast + torch fused + cast": 6 + 28 + 6.0}
    for name, (moments, master) in FORMS.items():
        param = Parameter(grad.clone())
        param.grad = grad
        state = zero_opt.AdamState(moments, master)
        steps[name] = zero_opt.CPUAdamW([param], threads=threads, state=state, **OPTIONS).step
        moved[name] = bytes_moved(moments, master)
    return steps, moved


def separate_passes(numel: int) -> tuple[str, Callable[[], object]]:
    """What ZeRO-Offload does: cast, norm, scale, DeepSpeedCPUAdam (torch fused where it is missing), cast."""
    grad, wide, out = random(numel).bfloat16(), torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
    param = with_grad(wide)
    theirs = deepspeed_adam(param)
    optimizer = theirs or torch.optim.AdamW([param], fused=True, **OPTIONS)

    def step() -> None:
        wide.copy_(grad)
        norm = float(torch.linalg.vector_norm(wide)) / LOSS_SCALE
        wide.mul_(min(1.0, MAX_NORM / (norm + 1e-6)) / LOSS_SCALE)
        optimizer.step()
        out.copy_(param.detach())

    return f"separate passes and {'torch fused' if theirs is None else 'DeepSpeedCPUAdam'}", step


def two_passes(numel: int, threads: int, moments: torch.dtype = torch.float32) -> Callable[[], object]:
    """Ours: one pass over the gradient for the norm, one over everything for the rest."""
    grad, param = random(numel).bfloat16(), random(numel)
    update = AdamUpdate(
        name="param",
        hypers=HYPERS,
        step=3.0,
        param=param,
        grad=grad,
        exp_avg=torch.zeros(numel, dtype=moments),
        exp_avg_sq=torch.zeros(numel, dtype=moments),
        out=torch.empty(numel, dtype=torch.bfloat16),
    )

    def step() -> None:
        norm = grad_squares([grad], threads=threads).total ** 0.5 / LOSS_SCALE
        scale = min(1.0, MAX_NORM / (norm + 1e-6)) / LOSS_SCALE
        adam_update_([update], grad_scale=scale, threads=threads)

    return step


def pipeline_contenders(numel: int, threads: int) -> Steps:
    """A whole mixed-precision step; the first is what the others are compared with."""
    name, step = separate_passes(numel)
    return {
        name: step,
        "zero_opt": two_passes(numel, threads),
        "zero_opt, bf16 moments": two_passes(numel, threads, torch.bfloat16),
    }
