"""fp16 gradients under ``torch.amp.GradScaler``: they stay scaled until the step, which unscales in its own pass.

GradScaler refuses to unscale fp16 gradients in place, because small ones would be lost. For an optimizer that can
unscale in its step, GradScaler only looks for non-finite values, sets ``grad_scale`` and ``found_inf`` on it, and calls
``step()``.
"""

from __future__ import annotations

import math
from typing import Any


def overflowed(optimizer: object) -> bool:
    """Return whether GradScaler has found a gradient that is not finite, so that the step is to be left out."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def scale_entry(inv_scale: float) -> tuple[str, Any]:
    """Return the loss scale as ranks compare it, given one over it."""
    return "loss scale of GradScaler", 1.0 / inv_scale if inv_scale else math.inf


def unscaling(optimizer: object) -> float:
    """Return the factor for gradients in the step: 1 unless GradScaler has left them scaled."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)
