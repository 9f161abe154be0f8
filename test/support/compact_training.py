"""Twenty steps of CPUAdamW with compact state, by ranks, and by the class alone that is fed the same mean gradient."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero_opt
from test.support.scenario import BUCKET_MB, SHAPES, add, mean, values

STEPS = 20
CLIP = 4.0


class Form(NamedTuple):
    """The dtype of parameters, and what is kept of them."""

    dtype: torch.dtype
    state: zero_opt.AdamState


FORMS = {
    "bfloat16": Form(torch.float32, zero_opt.AdamState("bfloat16")),
    "block8": Form(torch.float32, zero_opt.AdamState("block8")),
    "split": Form(torch.bfloat16, zero_opt.AdamState("float32", "split")),
    "bfloat16, split": Form(torch.bfloat16, zero_opt.AdamState("bfloat16", "split")),
    "block8, split": Form(torch.bfloat16, zero_opt.AdamState("block8", "split")),
    "block8, master": Form(torch.float16, zero_opt.AdamState("block8", "float32")),
}
REDUCTIONS: dict[str, Any] = {
    "Overlapped": zero_opt.Overlapped(BUCKET_MB),
    "AtStep": zero_opt.AtStep(BUCKET_MB),
    "AlreadyReduced": zero_opt.AlreadyReduced(),
}


def make_params(form: Form) -> list[nn.Parameter]:
    return [nn.Parameter(values(41, 0, 0, at, shape).to(form.dtype, copy=True)) for at, shape in enumerate(SHAPES)]


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Three param groups with different hyperparameters."""
    return [
        {"params": params[:3], "weight_decay": 0.1},
        {"params": params[3:7], "lr": 0.003, "amsgrad": True},
        {"params": params[7:], "betas": (0.4, 0.99), "maximize": True},
    ]


def turns(step: int) -> int:
    """How many backwards a step has."""
    return 1 + step % 2


def gradient(form: Form, step: int, turn: int, rank: int, at: int) -> Tensor | None:
    """A rank's gradient of a parameter in a backward. Some have none now and then; one has none at all."""
    if at == 5 or (at and (step + at) % 4 == 0) or (at and (turn + rank + at) % 5 == 0):
        return None
    return values(step, turn, rank, at, SHAPES[at]).to(form.dtype)


def reduced(form: Form, world_size: int, reduction: Any, step: int, at: int) -> Tensor | None:
    """The mean gradient of a step."""
    local = isinstance(reduction, zero_opt.AtStep)
    ranks = range(world_size)
    total: Tensor | None = None
    if local:
        sums: list[Tensor | None] = [None] * world_size
        for turn in range(turns(step)):
            sums = [add(sums[rank], gradient(form, step, turn, rank, at)) for rank in ranks]
        return mean(sums)
    for turn in range(turns(step)):
        total = add(total, mean([gradient(form, step, turn, rank, at) for rank in ranks]))
    return total


def clip_factor(params: list[nn.Parameter]) -> float:
    """What gradients are multiplied by where their norm is limited."""
    squares = [param.grad.double().square().sum() for param in params if param.grad is not None]
    norm = torch.stack(squares).sum().sqrt().float()
    return float(torch.clamp(CLIP / (norm + 1e-6), max=1.0))


def plain_steps(
    form: Form,
    world_size: int,
    reduction: Any,
    params: list[nn.Parameter],
    plain: Any,
    *,
    clip: bool = True,
    step: int = 0,
) -> Iterator[None]:
    """Make steps of the class itself from number ``step`` on, clipped as the optimizer clips."""
    while True:
        for at, param in enumerate(params):
            param.grad = reduced(form, world_size, reduction, step, at)
        plain.step(grad_scale=clip_factor(params) if clip else 1.0)
        step += 1
        yield


def expected(
    form: Form, world_size: int, reduction: Any, steps: int = STEPS, *, clip: bool = True
) -> tuple[list[Tensor], Any]:
    """Parameters, and the state in torch's form, of the class itself."""
    params = make_params(form)
    plain = zero_opt.CPUAdamW(groups_of(params), lr=0.02, state=form.state)
    for _ in islice(plain_steps(form, world_size, reduction, params, plain, clip=clip), steps):
        pass
    return [param.detach() for param in params], plain.state_dict()["state"]


def make_optimizer(params: list[nn.Parameter], form: Form, reduction: Any, **options: Any) -> zero_opt.ShardedOptimizer:
    given = {"lr": 0.02, "state": form.state, "max_grad_norm": CLIP, **options}
    return zero_opt.ShardedOptimizer(groups_of(params), zero_opt.CPUAdamW, reduction=reduction, **given)


def backward(params: list[nn.Parameter], form: Form, reduction: Any, step: int, rank: int, world_size: int) -> None:
    """Bring a step's gradients to the reduction."""
    if isinstance(reduction, zero_opt.AlreadyReduced):
        for at, param in enumerate(params):
            param.grad = reduced(form, world_size, reduction, step, at)
        return
    for turn in range(turns(step)):
        grads = {at: gradient(form, step, turn, rank, at) for at in range(len(params))}
        used = [at for at, grad in grads.items() if grad is not None]
        torch.autograd.backward([params[at] for at in used], [grads[at] for at in used])  # type: ignore[misc]


def train(
    rank: int, world_size: int, form: Form, reduction: Any, steps: int = STEPS, **options: Any
) -> tuple[list[Tensor], Any]:
    """One rank's parameters at the end, and the state in torch's form, on rank 0."""
    params = make_params(form)
    optimizer = make_optimizer(params, form, reduction, **options)
    for step in range(steps):
        optimizer.zero_grad()
        backward(params, form, reduction, step, rank, world_size)
        optimizer.step()
    optimizer.flush()
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in params], state
