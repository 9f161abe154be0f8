"""Strategies for where the shard lives; the type of the offload policy picks one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigTypeError
from .base import ParamState, Placement
from .device import (
    BucketwisePlacement,
    DevicePlacement,
    FusedAdamPlacement,
    bare_step,
    hypers_of,
    steps_params_apart,
)

__all__ = [
    "DevicePlacement",
    "ParamState",
    "Placement",
    "bare_step",
    "build_placement",
    "check_policy",
    "hypers_of",
    "steps_params_apart",
]


def check_policy(policy: object) -> None:
    """Raise ConfigTypeError unless ``policy`` is one this version can place."""
    if policy is not None:
        raise ConfigTypeError(f"offload must be None, got {policy!r}")


def build_placement(
    policy: None,  # noqa: ARG001  (the only policy so far)
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
) -> Placement:
    """The strategy a policy names; ``None`` is the parameters' own device."""
    if FusedAdamPlacement.serves(optimizer_class):
        return FusedAdamPlacement(optimizer_class, defaults)
    strategy = BucketwisePlacement if steps_params_apart(optimizer_class) else DevicePlacement
    return strategy(optimizer_class, defaults)
