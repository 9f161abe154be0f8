"""fp16 gradients under ``torch.amp.GradScaler``: they stay scaled until the step, which unscales in its own pass.

GradScaler refuses to unscale fp16 gradients in place, where small ones would be lost. Of an optimizer that says it
can, it has only looked for non-finite values when it calls ``step()``, and sets ``grad_scale`` and ``found_inf`` on it.
"""

from __future__ import annotations


def overflowed(optimizer: object) -> bool:
    """Whether GradScaler has found a gradient that is not finite, so that the step is to be left out."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def unscaling(optimizer: object) -> float:
    """What gradients are to be multiplied by: 1 unless GradScaler has left them scaled."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)
