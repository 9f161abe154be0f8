"""A function whose backward raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Failed(Exception):
    """What goes wrong in a pass over a model."""


class Tripwire(torch.autograd.Function):
    """Passes a value on; its backward raises :class:`Failed`, unless it is not armed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, armed: bool = True) -> Tensor:  # type: ignore[override]
        ctx.armed = armed
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.armed:
            raise Failed
        return grad, None
