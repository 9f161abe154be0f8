"""The wrapped class itself: its step, after checks and clipping of the gradients, its attributes and its pickles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigTypeError, UnsupportedOptimizer
from ..policies import Checks
from ..reduction.grad_norm import Measured, measure
from ..reduction.nonfinite import Ignored, NonFinite, build_nonfinite
from ..sharding.param_groups import normalized, param_name
from ..sharding.wrapped_class import bare_step, needs_closure
from .contents import adopt_errors

if TYPE_CHECKING:
    from .config import Recipe
    from .dtensors.mesh_params import MeshParams


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


class Wrapping(torch.optim.Optimizer):
    """The part of an optimizer that hands everything to the wrapped class, where that steps the parameters directly."""

    _recipe: Recipe
    _mesh: MeshParams | None
    _inner: torch.optim.Optimizer | None = None
    _alone_step: AloneStep

    def _describe(self, index: int) -> str:
        """How messages name the parameter with a global index."""
        return param_name(self.param_groups, index)

    def _wrapped(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Have the wrapped class step these parameters directly; returns the wrapped optimizer."""
        recipe = self._recipe
        check_skippable(recipe.optimizer_class, recipe.checks)
        kind = AloneStep if self._mesh is None else self._mesh.stepper
        self._alone_step = kind(build_nonfinite(recipe.checks, self._describe), recipe.max_grad_norm)
        with adopt_errors():
            self._inner = recipe.optimizer_class(normalized(params), **recipe.defaults)
        return self._inner

    def _build_alone(self, params: Iterable[Any]) -> None:
        inner = self._wrapped(params)
        super().__init__(inner.param_groups, inner.defaults)
        self._share_inner()

    def _share_inner(self) -> None:
        """Share the wrapped optimizer's groups and state, so that both are the same objects."""
        assert self._inner is not None
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def _alone(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer, with this one's groups and state even if the user has replaced them."""
        assert self._inner is not None
        self._inner.param_groups, self._inner.state = self.param_groups, self.state
        if self._mesh is not None:
            self._mesh.follow(self.param_groups, self._recipe)
        return self._inner

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the wrapped optimizer that this one lacks."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(inner, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return what ``copy`` and ``pickle`` keep, at world size 1 only."""
        if self._inner is None:
            raise ConfigTypeError(
                "a ShardedOptimizer over several ranks, or with an offload, cannot be copied or pickled, since its "
                "state is not in this process alone; save opt.state_dict() after opt.consolidate_state_dict(to=rank) "
                "on every rank"
            )
        self._alone()
        kept = ("defaults", "_inner", "_recipe", "_parked", "_alone_step", "_sharded", "_mesh", "_wired", "_closed")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_inner" in state:
            super().__setstate__(state)
        elif self._inner is None:
            raise ConfigTypeError("__setstate__() over several ranks, or with an offload: use load_state_dict()")
        else:  # the wrapped class's own form; the class completes one that an older version of it wrote
            self._alone().__setstate__(state)
        self._share_inner()
