"""The kernels called on bare arrays, by name of instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_opt import _native

HYPERS: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 3.0,
    "decoupled": True,
    "maximize": False,
}


def arrays(numel: int, seed: int = 0) -> list[Tensor]:
    """param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq over many magnitudes, subnormal to huge."""
    generator = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        scale = torch.randint(-44, 18, (numel,), generator=generator).float()
        return torch.randn(numel, generator=generator) * 10.0**scale

    return [values(), values(), values(), values().abs(), values().abs()]


def adam(tensors: Sequence[Tensor], *, isa: str = "", amsgrad: bool = True, **hypers: Any) -> None:
    """One native step on 1-D tensors, as ``arrays`` gives them, in place."""
    scalars = _native.AdamScalars(**{**HYPERS, **hypers})
    addresses = [t.data_ptr() for t in (tensors if amsgrad else tensors[:4])]
    _native.adam_step([_native.AdamRun(scalars, tensors[0].numel(), *addresses)], isa)


def fma(a: Tensor, b: Tensor, c: Tensor, isa: str) -> Tensor:
    """a * b + c, rounded once, by the kernels' own multiply-add."""
    out = torch.empty_like(a)
    _native.fma(a.numel(), a.data_ptr(), b.data_ptr(), c.data_ptr(), out.data_ptr(), isa)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of every bit, except that any NaN is any other."""
    nan = a.isnan() & b.isnan()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | nan).all())
