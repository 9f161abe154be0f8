"""``torch.amp.GradScaler`` in a step of all ranks: its scale, and whether gradients have overflowed on a rank.

GradScaler does not hand itself to an optimizer, but its ``step()`` reads ``_step_supports_amp_scaling``, whose getter
looks for it. Where that is false, GradScaler unscales the gradients, and calls the optimizer's ``step()`` if they are
finite on this rank. Where it is true, GradScaler only looks for gradients that are not finite, sets ``grad_scale`` and
``found_inf`` on the optimizer, and calls ``step()`` in any case. It is true

- of fp16 gradients, which GradScaler refuses to unscale in place, because small ones would be lost. They stay scaled
  until the step, which unscales in its own pass;
- where GradScaler sees this rank's own gradients (``AtStep``): an overflow on one rank keeps every rank from stepping.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

Unscaling = Callable[[Tensor], AbstractContextManager[None]]


def note_scaler(optimizer: torch.optim.Optimizer, unscaling: Unscaling | None) -> bool:
    """Note the GradScaler whose ``step()`` reads a property, whose getter calls this function; return if there is one.

    Args:
        unscaling: if given, have GradScaler unscale the gradients now, unless it has, in the context that this makes.
    """
    frame = sys._getframe(2)
    scaler = frame.f_locals.get("self")
    if not isinstance(scaler, GradScaler) or frame.f_locals.get("optimizer") is not optimizer:
        return False
    vars(optimizer)["_scaler"] = weakref.ref(scaler)
    if unscaling is not None and scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        with unscaling(torch.tensor(inverse_scale(optimizer), dtype=torch.float32, device="cpu")):
            scaler.unscale_(optimizer)
    return True


def _noted(optimizer: object) -> GradScaler | None:
    reference = vars(optimizer).get("_scaler")
    scaler: GradScaler | None = None if reference is None else reference()
    return scaler


def overflowed(optimizer: object) -> bool:
    """Return whether GradScaler has found a gradient that is not finite, so that the step is to be left out."""
    return bool(getattr(optimizer, "found_inf", False))


def leaves_scaled(optimizer: object) -> bool:
    """Return whether GradScaler has left the gradients scaled for the step."""
    return getattr(optimizer, "grad_scale", None) is not None


def inverse_scale(optimizer: object) -> float:
    """Return one over the loss scale; 1 unless GradScaler calls the step."""
    scale, scaler = getattr(optimizer, "grad_scale", None), _noted(optimizer)
    if scale is None:
        scale = 1.0 if scaler is None else scaler.get_scale()
    return 1.0 / float(scale) if scale else math.inf


def tell_scaler(optimizer: torch.optim.Optimizer, *, overflows: bool) -> None:
    """Let GradScaler back off for an overflow on any rank; it also needs to know of none where there is no gradient."""
    scaler = _noted(optimizer)
    if scaler is not None:
        found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
        if not found:
            found["none"] = torch.zeros((), dtype=torch.float32, device="cpu")
        for flag in found.values() if overflows else ():
            flag.fill_(1.0)


@contextmanager
def forgets_scaler(optimizer: object) -> Iterator[None]:
    """A context of a call by GradScaler before its step, which does not come if this raises."""
    try:
        yield
    except BaseException:
        vars(optimizer).pop("_scaler", None)
        raise


@contextmanager
def forgets_scale(optimizer: object) -> Iterator[None]:
    """A context of a step that, if it raises, takes away what GradScaler has set for it.

    GradScaler would multiply the next step's scale by it.
    """
    try:
        yield
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        raise
    finally:
        vars(optimizer).pop("_scaler", None)
