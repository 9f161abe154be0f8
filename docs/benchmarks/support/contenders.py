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
PARAM_NUMEL = 1 << 22
CAST, CAST_KEPT = "cast + torch fused + cast", "the same, buffers kept"
READING, MOVING = "reading the inputs once", "reading and writing as much"
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


def moving(tensors: list[Tensor], out: Tensor | None = None) -> Callable[[], object]:
    """Moves as many bytes as a step and does as little with them as can be; the gradient comes second."""
    grad = tensors[1]

    def step() -> None:
        for tensor in tensors:
            if tensor is not grad:
                tensor.neg_()
        grad.sum() if out is None else torch.neg(grad, out=out)

    return step


def pieces(tensor: Tensor) -> list[Tensor]:
    """A flat tensor as parameters of a usual size."""
    return list(tensor.split(PARAM_NUMEL))


def casting(numel: int) -> Callable[[], object]:
    """As a training loop has it: each bf16 gradient to fp32, torch's fused step, each fp32 param to bf16."""
    narrow = [Parameter(piece.clone()) for piece in pieces(random(numel).bfloat16())]
    masters = [Parameter(param.detach().float()) for param in narrow]
    for param in narrow:
        param.grad = param.detach().clone()
    optimizer = torch.optim.AdamW(masters, fused=True, **OPTIONS)

    @torch.no_grad()
    def step() -> None:
        for param, master in zip(narrow, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        optimizer.step()
        for param, master in zip(narrow, masters, strict=True):
            param.copy_(master)
        optimizer.zero_grad()

    return step


def casting_kept(numel: int) -> Callable[[], object]:
    """The same with a buffer for the fp32 gradients that is kept, one flat tensor of each kind."""
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
    grads = pieces(grad)
    steps: Steps = {CAST: casting(numel), CAST_KEPT: casting_kept(numel)}
    moved = dict.fromkeys(steps, 6 + 28 + 6.0)
    for name, (moments, master) in FORMS.items():
        params = [Parameter(piece.clone()) for piece in grads]
        for param, piece in zip(params, grads, strict=True):
            param.grad = piece
        state = zero_opt.AdamState(moments, master)
        steps[name] = zero_opt.CPUAdamW(params, threads=threads, state=state, **OPTIONS).step
        moved[name] = bytes_moved(moments, master)
    steps[MOVING] = moving([random(numel), grad, random(numel), random(numel)], torch.empty_like(grad))
    moved[MOVING] = bytes_moved(*FORMS["one pass"])
    return steps, moved


def deepspeed_passes(numel: int) -> tuple[str, Callable[[], object]]:
    """What DeepSpeed 0.19 does in ZeRO-Offload (stage_1_and_2.py), from the reduced gradient of each parameter on.

    Per parameter: look for values that are not finite, norm of a copy in fp32, cast, copy to the flat buffer; then
    scale, step, cast to a bf16 buffer, copy to the parameters. torch's fused Adam where deepspeed is not installed.
    """
    grads = pieces(random(numel).bfloat16())
    wide, buffer, out = torch.empty(numel), torch.empty(numel).bfloat16(), torch.empty(numel).bfloat16()
    param = with_grad(wide)
    theirs = deepspeed_adam(param)
    optimizer = theirs or torch.optim.AdamW([param], fused=True, **OPTIONS)

    def step() -> None:
        squares, overflow = 0.0, False
        for grad, into in zip(grads, pieces(wide), strict=True):
            overflow |= not bool(torch.isfinite(grad.amax()) & torch.isfinite(grad.amin()))
            squares += float(grad.float().norm(2)) ** 2
            into.copy_(grad.float())
        if overflow:
            return
        wide.mul_(clip_factor(squares**0.5))
        optimizer.step()
        buffer.copy_(param.detach())
        out.copy_(buffer)

    return f"DeepSpeed's passes and {'torch fused' if theirs is None else 'DeepSpeedCPUAdam'}", step


def fewest_passes(numel: int) -> tuple[str, Callable[[], object]]:
    """Cast, norm, scale, DeepSpeedCPUAdam (torch fused where it is missing), cast; all buffers are kept."""
    grad, wide, out = random(numel).bfloat16(), torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
    param = with_grad(wide)
    theirs = deepspeed_adam(param)
    optimizer = theirs or torch.optim.AdamW([param], fused=True, **OPTIONS)

    def step() -> None:
        wide.copy_(grad)
        wide.mul_(clip_factor(float(torch.linalg.vector_norm(wide))))
        optimizer.step()
        out.copy_(param.detach())

    return f"fewest separate passes and {'torch fused' if theirs is None else 'DeepSpeedCPUAdam'}", step


def clip_factor(scaled_norm: float) -> float:
    """What gradients are multiplied by to unscale and to clip them."""
    return min(1.0, MAX_NORM / (scaled_norm / LOSS_SCALE + 1e-6)) / LOSS_SCALE


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
        norm = grad_squares([grad], threads=threads).total ** 0.5
        adam_update_([update], grad_scale=clip_factor(norm), threads=threads)

    return step


def pipeline_contenders(numel: int, threads: int) -> Steps:
    """A whole mixed-precision step; the first is what the others are compared with."""
    return {
        **dict([deepspeed_passes(numel), fewest_passes(numel)]),
        "zero_opt": two_passes(numel, threads),
        "zero_opt, bf16 moments": two_passes(numel, threads, torch.bfloat16),
    }
