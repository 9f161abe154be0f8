"""The engine of an optimizer without other ranks, masters or an offload: the wrapped class itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from ..comm.alone_group import AloneGroup
from ..comm.groups import Group, checked_rank
from ..comm.rendezvous import resolve_group
from ..errors import ConfigConflict, UnsupportedOptimizer, ZeroOptError
from ..kernels.adam_state import code_key
from ..kernels.strides import resolved
from ..placement.compact_state import is_compact
from ..reduction.grad_norm import Joint, Share, alone, check_max_norm, norm_dtype, share_of
from ..reduction.nonfinite import skips_step
from ..sharding.flat_param import is_dtensor
from ..sharding.param_groups import normalized, normalized_group, param_name, params_of
from ..sharding.wrapped_class import bare_step, needs_closure, require_real_if_fused
from ..state.state_dict import StateDict, StatesByIndex, copied
from ..system.failures import on_failure
from ..system.log import log
from .arguments import adopt_errors
from .config import Config
from .dtensors.mesh_params import MeshParams, admit
from .hyperparameters import require_types
from .interface import MET_NONE, Engine
from .loading import fitted_state
from .offload_state import Parked


class _NotTaken(Exception):
    """The exception that leaves the wrapped class's step from within its closure, before anything is changed."""


def _no_user() -> None:
    """Return no optimizer: the engine is not attached to one."""


def _resolve_grads(params: Iterable[Tensor]) -> None:
    """Replace gradients that torch conjugates or negates as it reads them, which its own functions refuse to clip."""
    for param in params:
        grad = param.grad
        if grad is not None and (grad.is_conj() or grad.is_neg()) and not is_dtensor(grad):
            param.grad = resolved(grad.detach())


class SingleRank(Engine):
    """The engine that has the wrapped class step the parameters, on a rank alone. Nothing is collective.

    The optimizer and the wrapped one share their param groups and state. If the user puts others in the place of the
    optimizer's, the wrapped one takes those over with the next call.
    """

    wrapped: torch.optim.Optimizer
    steps = skips = 0
    unscales = False
    _met_none = False  # whether a step has met no gradient, which the log says once

    def __init__(self, config: Config, params: Iterable[Any], parked: Parked, mesh: MeshParams | None = None) -> None:
        if config.checks.nonfinite == "skip" and needs_closure(config.optimizer_class):
            raise UnsupportedOptimizer(
                f"{config.optimizer_class.__name__} evaluates gradients in the middle of its step, which cannot be "
                'skipped then; use Checks(nonfinite="raise")'
            )
        self._config, self._parked, self._mesh = config, parked, mesh
        groups = normalized(params)
        with adopt_errors():
            try:
                wrapped = config.optimizer_class(groups, **config.defaults)
            except ValueError:  # says what is wrong
                raise
            except Exception:  # of a type that torch has not expected, which it does not name
                require_types(config.optimizer_class, groups, config.defaults)
                raise
        require_real_if_fused(config.optimizer_class, wrapped.param_groups)
        self.wrapped = wrapped
        self._looks = config.max_grad_norm is not None or config.checks.nonfinite != "ignore"
        self._has_complex = any(map(Tensor.is_complex, params_of(wrapped.param_groups)))
        self._user: Callable[[], Any] = _no_user

    @property
    def group(self) -> Group:
        return AloneGroup()

    # -- the wrapped optimizer ----------------------------------------------------------------------------------------

    def attach(self, user: torch.optim.Optimizer) -> None:
        self._user = weakref.ref(user)  # so that both are collected as soon as they are dropped
        user.param_groups, user.state = self.wrapped.param_groups, self.wrapped.state
        user.defaults = self.wrapped.defaults

    def __getstate__(self) -> dict[str, Any]:
        self._current()
        return {**vars(self), "_user": _no_user}

    def _current(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer, with the user's groups and state even if those have been replaced."""
        user = self._user()
        if user is not None:
            self.wrapped.param_groups, self.wrapped.state = user.param_groups, user.state
        return self.wrapped

    @property
    def _params(self) -> list[Tensor]:
        return [param for group in self._current().param_groups for param in group["params"]]

    def add_param_group(self, group: dict[str, Any]) -> None:
        self._parked.require_here()
        wrapped = self._current()
        taken = normalized_group(group, len(wrapped.param_groups))
        with adopt_errors():
            admit(self._mesh, params_of([taken]))
            wrapped.add_param_group(taken)
        with on_failure(wrapped.param_groups.pop):
            require_real_if_fused(self._config.optimizer_class, wrapped.param_groups)
        self._has_complex = self._has_complex or any(map(Tensor.is_complex, params_of([taken])))

    # -- the step -----------------------------------------------------------------------------------------------------

    def step(
        self, closure: Callable[[], Any] | None, options: Mapping[str, Any], error: ZeroOptError | None = None
    ) -> Any:
        if error is not None:
            raise error
        self._parked.require_here()
        wrapped = self._current()
        if closure is None and not self._met_none:
            self._met_none = all(param.grad is None for group in wrapped.param_groups for param in group["params"])
            if self._met_none:
                log.warning(MET_NONE)
        if not self._looks and not self._has_complex:
            return self._counted(closure, options)
        losses: list[Any] = [None]

        def prepared() -> Any:
            if closure is not None:
                losses.append(closure())
            params, limit = self._params, self._config.max_grad_norm
            _resolve_grads(params)
            if not self._looks:
                return losses[-1]
            share = self._share(params, limit or 0.0)
            if self.will_skip(share.nonfinite):
                raise _NotTaken
            if limit is not None:
                self._scale(params, limit, alone(share).norm)
            return losses[-1]

        try:
            if closure is not None:
                return self._counted(prepared, options)
            prepared()
            return self._counted(None, options)
        except _NotTaken:
            self.skips += 1
            return losses[-1]

    def _counted(self, closure: Callable[[], Any] | None, options: Mapping[str, Any]) -> Any:
        """Have the wrapped class step, and count that."""
        loss = bare_step(self.wrapped, closure, **options)
        self.steps += 1
        return loss

    def stats(self) -> dict[str, float]:
        return {"steps": float(self.steps), **super().stats()}

    def clip(self, max_norm: object, joint: Joint = alone, error: ZeroOptError | None = None) -> Tensor:
        if error is not None:
            raise error
        limit = check_max_norm(max_norm, "max_norm")
        self._parked.require_here()
        params = self._params
        _resolve_grads(params)
        measured = joint(self._share(params, limit))
        if not self.will_skip(measured.nonfinite):
            self._scale(params, limit, measured.norm)
        return measured.norm

    def will_skip(self, nonfinite: tuple[int, int] | None) -> bool:
        return skips_step(self._config.checks, lambda: nonfinite, self._describe)

    def _describe(self, index: int) -> str:
        return param_name(self.wrapped.param_groups, index)

    def _share(self, params: Sequence[Tensor], limit: float) -> Share:  # noqa: ARG002  (no rank has another)
        """Return what the gradients add to a norm.

        Args:
            limit: what the norm will be clipped to; 0 if it will not.
        """
        grads = [param.grad for param in params]
        looked = grads if self._config.checks.nonfinite != "ignore" else [None] * len(params)
        share = share_of(looked, range(len(params)), None, dtype=norm_dtype(params))
        return share._replace(grads=[grad for grad in grads if grad is not None])

    def _scale(self, params: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)

    def take_bucket(self, bucket: GradBucket) -> None:  # noqa: ARG002  (of the protocol)
        """Leave DistributedDataParallel's bucket as it is, on a rank alone."""
        world = resolve_group(None)
        if world is not None and world.size() > 1:
            raise ConfigConflict("the ShardedOptimizer is over one rank and cannot reduce for DDP; leave out the hook")

    # -- state --------------------------------------------------------------------------------------------------------

    def consolidate(self, to: int) -> None:
        checked_rank(to, 1, "to")

    def rows(self, *, compact: bool) -> StatesByIndex:
        wrapped = self._current()
        states = wrapped.state_dict()["state"]
        if compact and is_compact(self._config.placement.inputs.form):
            live = enumerate(wrapped.state.get(param, {}) for param in self._params)
            states = {i: {code_key(key, value): value for key, value in state.items()} for i, state in live if state}
        return copied(states, torch.device("cpu"))

    def state_dict(self) -> StateDict:
        return self._current().state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        self._current().__setstate__(state)

    def load(self, state_dict: StateDict, *, strict: bool) -> None:
        self._parked.require_here()
        wrapped, user = self._current(), self._user()
        loaded = fitted_state(state_dict, wrapped.param_groups, self._config, strict=strict, whole=True)
        wrapped.load_state_dict(
            self._in_form(loaded.refused.for_class(state_dict, loaded.states, wrapped.param_groups))
        )
        if user is not None:
            self.attach(user)
        loaded.say(self._config, self._params, self._describe)

    def _in_form(self, state_dict: StateDict) -> StateDict:
        """Return a checked state dict as the wrapped class loads it."""
        return state_dict

    def memory_report(self) -> dict[str, int]:
        return dict.fromkeys(("grad_shards", "staging", "state"), 0)
