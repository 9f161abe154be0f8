"""World size 1: the wrapped class's own step, after what is asked of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .construction import needs_closure
from .errors import UnsupportedOptimizer
from .grad_norm import Measured, measure
from .nonfinite import Ignored, NonFinite
from .placement import bare_step
from .policies import Checks


class _NotTaken(Exception):
    """Leaves the wrapped class's step from within its closure, before anything is changed."""


def check_skippable(optimizer_class: type[torch.optim.Optimizer], checks: Checks) -> None:
    """Raise UnsupportedOptimizer if a step cannot be left out as ``checks`` asks."""
    if checks.nonfinite == "skip" and needs_closure(optimizer_class):
        raise UnsupportedOptimizer(
            f"{optimizer_class.__name__} evaluates gradients in the middle of its step, which cannot be skipped then; "
            'use Checks(nonfinite="raise")'
        )


class AloneStep:
    """Steps an optimizer that has no other ranks.

    Attributes:
        skips: steps that were not taken because of non-finite gradients.
    """

    def __init__(self, nonfinite: NonFinite, max_grad_norm: float | None) -> None:
        self._nonfinite, self._max_grad_norm, self.skips = nonfinite, max_grad_norm, 0
        self._prepares = max_grad_norm is not None or not isinstance(nonfinite, Ignored)

    def step(self, inner: torch.optim.Optimizer, closure: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
        """``inner.step``; what the closure returns."""
        if not self._prepares:
            return bare_step(inner, closure, **options)
        losses: list[Any] = [None]

        def prepared() -> Any:
            if closure is not None:
                losses.append(closure())
            params = [param for group in inner.param_groups for param in group["params"]]
            if self._nonfinite.skips(lambda: self._measured(params)):
                raise _NotTaken
            if self._max_grad_norm is not None:
                self._scale(params, self._max_grad_norm)
            return losses[-1]

        try:
            if closure is not None:
                return bare_step(inner, prepared, **options)
            prepared()
            return bare_step(inner, **options)
        except _NotTaken:
            self.skips += 1
            return losses[-1]

    def clip(self, params: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the global L2 norm, unless no step is to be taken with these gradients; the norm before."""
        if self._nonfinite.skips(lambda: self._measured(params)):
            return self._norm(params)
        return self._scale(params, max_norm)

    def _measured(self, params: Sequence[Tensor]) -> Measured:
        return measure([param.grad for param in params], range(len(params)), None)

    def _norm(self, params: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])

    def _scale(self, params: Sequence[Tensor], max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
