"""fp16 gradients under ``torch.amp.GradScaler``: they stay scaled until the step, which unscales in its own pass.

GradScaler refuses to unscale fp16 gradients in place, where small ones would be lost. Of an optimizer that says it
can, it has only looked for non-finite values when it calls ``step()``, and sets ``grad_scale`` and ``found_inf`` on it.
"""

from __future__ import annotations

from typing import Any

import torch


class LossScaled:
    """What GradScaler asks of an optimizer over several ranks, or with masters or an offload."""

    param_groups: list[dict[str, Any]]
    _sharded: Any

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step()`` unscales; gradients other than fp16 GradScaler may unscale by itself."""
        params = (param for group in self.param_groups for param in group["params"])
        return self._sharded is not None and any(param.dtype is torch.float16 for param in params)


def overflowed(optimizer: object) -> bool:
    """Whether GradScaler has found a gradient that is not finite, so that the step is to be left out."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def unscaling(optimizer: object) -> float:
    """What gradients are to be multiplied by: 1 unless GradScaler has left them scaled."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)
