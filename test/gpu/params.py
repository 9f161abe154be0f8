"""Parameters and gradients that are the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = [(33, 9), (65,), (100_000,), (), (7, 64)]


def params_on(device: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(device, dtype)) for size in SIZES]


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
