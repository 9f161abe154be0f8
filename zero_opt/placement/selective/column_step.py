"""One Adam step of the selected columns of a slice, on the device where its parameter is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOptimizer
from ...kernels import AdamUpdate, adam_update_
from ...kernels.adam_state import MOMENTS
from ...kernels.checks import GRAD_DTYPES
from ...kernels.functions import adam_hypers
from ..adam_rules import MAXIMUM
from .column_shard import ColumnSlice


class ColumnSteps:
    """Steps by the native kernel in host memory, elsewhere by torch's fused one.

    Args:
        defaults: the optimizer class's arguments. threads: how many step; ``None`` is the default.
    """

    def __init__(self, defaults: Mapping[str, Any], threads: int | None) -> None:
        self._threads = threads
        self._flush = bool(defaults.get("flush_denormals", False))

    def step(self, column_slice: ColumnSlice, grad: Tensor, group: Mapping[str, Any], grad_scale: float) -> None:
        """Step the selected columns.

        Args:
            grad: of the slice, (numel,).
        """
        if group["amsgrad"] and MAXIMUM not in column_slice.compact:
            raise UnsupportedOptimizer("amsgrad cannot be switched on after its param group was added")
        taken = column_slice.take(grad, column_slice.selected)
        if taken.dtype not in GRAD_DTYPES:
            taken = taken.float()
        if taken.is_cpu:
            adam_update_(
                _native_updates(column_slice, taken, group),
                grad_scale=grad_scale,
                threads=self._threads,
                flush_denormals=self._flush,
            )
        else:
            _step_on_device(column_slice, taken.float().mul_(grad_scale), group)


def _stretch_parts(
    column_slice: ColumnSlice, grad: Tensor, *, amsgrad: bool
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """(steps done, gradient and state) of columns with one step count."""
    roles = ("param", *MOMENTS, *([MAXIMUM] if amsgrad else []))
    for start, stop, count in column_slice.stretches(column_slice.selected):
        yield count, {"grad": grad[start:stop], **{role: column_slice.compact[role][start:stop] for role in roles}}


def _native_updates(column_slice: ColumnSlice, grad: Tensor, group: Mapping[str, Any]) -> list[AdamUpdate]:
    hypers = adam_hypers(group)
    return [
        AdamUpdate(name="selected columns", hypers=hypers, step=count + 1, **part)
        for count, part in _stretch_parts(column_slice, grad, amsgrad=bool(group["amsgrad"]))
    ]


def _step_on_device(column_slice: ColumnSlice, grad: Tensor, group: Mapping[str, Any]) -> None:
    hypers, amsgrad = adam_hypers(group), bool(group["amsgrad"])
    kernel = torch._fused_adamw_ if hypers.decoupled else torch._fused_adam_
    for count, part in _stretch_parts(column_slice, grad, amsgrad=amsgrad):
        kernel(
            [part["param"]],
            [part["grad"]],
            [part["exp_avg"]],
            [part["exp_avg_sq"]],
            [part[MAXIMUM]] if amsgrad else [],
            [torch.tensor(count + 1, dtype=torch.float32, device=grad.device)],
            lr=hypers.lr,
            beta1=hypers.beta1,
            beta2=hypers.beta2,
            weight_decay=hypers.weight_decay,
            eps=hypers.eps,
            amsgrad=amsgrad,
            maximize=hypers.maximize,
        )
