"""One Adam step of the selected columns of a slice, on the device where its parameter is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOptimizer
from ...kernels import AdamUpdate
from ...kernels.adam_state import MAXIMUM
from ...kernels.checks import GRAD_DTYPES
from ...kernels.functions import adam_hypers
from ..adam_rules import state_keys
from .column_shard import ColumnSlice


def step_columns(
    column_slice: ColumnSlice, grad: Tensor, group: Mapping[str, Any], grad_scale: float, update: Callable[..., int]
) -> None:
    """Step the selected columns, by the native kernel in host memory, elsewhere by torch's fused one.

    Args:
        grad: of the slice, (numel,).
        update: :func:`adam_update_` with the user's options.
    """
    if group["amsgrad"] and MAXIMUM not in column_slice.selected_state:
        raise UnsupportedOptimizer("amsgrad cannot be switched on after its param group was added")
    taken = column_slice.take(grad, column_slice.selected)
    if taken.dtype not in GRAD_DTYPES:
        taken = taken.float()
    if not taken.is_cpu:
        _step_on_device(column_slice, taken.float().mul_(grad_scale), group)
        return
    hypers = adam_hypers(group)
    updates = [
        AdamUpdate(name="selected columns", hypers=hypers, step=count + 1, **part)
        for count, part in _stretch_parts(column_slice, taken, amsgrad=bool(group["amsgrad"]))
    ]
    update(updates, grad_scale=grad_scale)


def _stretch_parts(
    column_slice: ColumnSlice, grad: Tensor, *, amsgrad: bool
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """(steps done, gradient and state) of columns with one step count."""
    roles = ("param", *state_keys(amsgrad=amsgrad))
    for start, stop, count in column_slice.stretches(column_slice.selected):
        state = {role: column_slice.selected_state[role][start:stop] for role in roles}
        yield count, {"grad": grad[start:stop], **state}


def _step_on_device(column_slice: ColumnSlice, grad: Tensor, group: Mapping[str, Any]) -> None:
    options, amsgrad = asdict(adam_hypers(group)), bool(group["amsgrad"])
    kernel = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
    for count, part in _stretch_parts(column_slice, grad, amsgrad=amsgrad):
        kernel(
            [part["param"]],
            [part["grad"]],
            [part["exp_avg"]],
            [part["exp_avg_sq"]],
            [part[MAXIMUM]] if amsgrad else [],
            [torch.tensor(count + 1, dtype=torch.float32, device=grad.device)],
            amsgrad=amsgrad,
            **options,
        )
