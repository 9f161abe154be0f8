"""One Adam step of selected columns, on the device where their parameter is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ...kernels import AdamUpdate
from ...kernels.adam_state import MAXIMUM
from ...kernels.checks import GRAD_DTYPES
from ...kernels.functions import ADAM, adam_hypers


def step_selected(
    arrays: Mapping[str, Tensor],
    grad: Tensor,
    number: float,
    group: Mapping[str, Any],
    grad_scale: float,
    update: Callable[..., int],
) -> None:
    """Step by the native kernel in host memory, elsewhere by torch's fused one.

    Args:
        arrays: "param", the master, and moments; fp32, as large as the gradient.
        number: of the step. update: :func:`adam_update_` with the user's options.
    """
    amsgrad, hypers = bool(group["amsgrad"]), adam_hypers(group)
    used = {role: arrays[role] for role in ("param", *ADAM.roles(group))}
    if grad.is_cpu:
        taken = grad if grad.dtype in GRAD_DTYPES else grad.float()
        named = AdamUpdate(name="selected columns", hypers=hypers, step=number, grad=taken, **used)
        update([named], grad_scale=grad_scale)
        return
    options = asdict(hypers)
    kernel = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    kernel(
        [used["param"]],
        [grad.float().mul_(grad_scale)],
        [used["exp_avg"]],
        [used["exp_avg_sq"]],
        [used[MAXIMUM]] if amsgrad else [],
        [torch.tensor(number, dtype=torch.float32, device=grad.device)],
        amsgrad=amsgrad,
        **options,
    )
