"""Strategies for where the shard lives; the type of the offload policy picks one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import Group
from ..errors import ConfigTypeError
from ..policies import AlreadyReduced, WorkerOffload
from ..reduction import Policy as Reduction
from .base import ParamState, Placement
from .device import (
    BucketwisePlacement,
    DevicePlacement,
    FusedAdamPlacement,
    bare_step,
    hypers_of,
    steps_params_apart,
)
from .speculation import SpeculativePlacement
from .worker import WorkerPlacement
from .worker import check_groups as _check_worker_groups
from .worker import check_params as _check_worker_params
from .worker import check_state as _check_worker_state

Policy = WorkerOffload | None

__all__ = [
    "DevicePlacement",
    "ParamState",
    "Placement",
    "Policy",
    "bare_step",
    "build_placement",
    "check_params",
    "check_policy",
    "check_state",
    "hypers_of",
    "steps_params_apart",
]


def check_policy(policy: object) -> None:
    """Raise ConfigTypeError unless ``policy`` is one this version can place."""
    if policy is not None and not isinstance(policy, WorkerOffload):
        called = f"; write {policy.__name__}()" if isinstance(policy, type) else ""
        raise ConfigTypeError(f"offload must be None or WorkerOffload(), got {policy!r}{called}")


def check_params(
    policy: Policy,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    describe: Callable[[int], str],
) -> None:
    """Raise UnsupportedOptimizer or UnsupportedParam, naming it, for what cannot be stepped where the policy says."""
    if policy is not None:
        _check_worker_groups(optimizer_class, groups)
        _check_worker_params((param for group in groups for param in group["params"]), describe)


def check_state(
    policy: Policy,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Iterable[Mapping[str, Any]],
    states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Raise UnsupportedOptimizer or StateDictError for loaded groups and states that a placement cannot take."""
    if policy is not None:
        _check_worker_groups(optimizer_class, groups)
        _check_worker_state(states)


def build_placement(
    policy: Policy,
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    group: Group,
    reduction: Reduction,
) -> Placement:
    """The strategy a policy names; ``None`` is the parameters' own device. Collective.

    Args:
        reduction: where gradients come from.
    """
    if policy is not None:
        if policy.speculate:
            return SpeculativePlacement(policy, defaults, group, reduction)
        grad_buffers = 1 if isinstance(reduction, AlreadyReduced) else 1 + policy.delay
        return WorkerPlacement(policy, defaults, group, grad_buffers)
    if FusedAdamPlacement.serves(optimizer_class):
        return FusedAdamPlacement(optimizer_class, defaults)
    strategy = BucketwisePlacement if steps_params_apart(optimizer_class) else DevicePlacement
    return strategy(optimizer_class, defaults)
