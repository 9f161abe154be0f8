"""One Adam step of selected columns, on the device where their parameters are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ...kernels import AdamUpdate


def step_selected(updates: Sequence[AdamUpdate], grad_scale: float, update: Callable[..., Any]) -> None:
    """Step by the native kernel in host memory, elsewhere by torch's fused one.

    Args:
        updates: with the same hyperparameters, on one device. update: :func:`adam_update_` with the user's options.
    """
    if all(each.param.is_cpu for each in updates):
        update(updates, grad_scale=grad_scale)
        return
    options = asdict(updates[0].hypers)
    kernel = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    largest = [each.max_exp_avg_sq for each in updates if each.max_exp_avg_sq is not None]
    kernel(
        [each.param for each in updates],
        [each.grad.float() * grad_scale for each in updates],
        [each.exp_avg for each in updates],
        [each.exp_avg_sq for each in updates],
        largest,
        [torch.tensor(each.step, dtype=torch.float32, device=each.param.device) for each in updates],
        amsgrad=bool(largest),
        **options,
    )
