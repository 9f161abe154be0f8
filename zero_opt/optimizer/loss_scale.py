"""fp16 gradients under ``torch.amp.GradScaler``: they stay scaled until the step, which unscales in its own pass.

GradScaler refuses to unscale fp16 gradients in place, because small ones would be lost. For an optimizer that can
unscale in its step, GradScaler only looks for non-finite values, sets ``grad_scale`` and ``found_inf`` on it, and calls
``step()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def overflowed(optimizer: object) -> bool:
    """Return whether GradScaler has found a gradient that is not finite, so that the step is to be left out."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def unscaling(optimizer: object) -> float:
    """Return the factor for gradients in the step: 1 unless GradScaler has left them scaled."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)


@contextmanager
def forgets_scale(optimizer: object) -> Iterator[None]:
    """A context that, if it raises, takes away what GradScaler has set for the step.

    GradScaler would multiply the next step's scale by it.
    """
    try:
        yield
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        raise
