"""Strategies for where the shard lives; the type of the offload policy picks one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigTypeError
from .base import ParamState, Placement
from .device import (
    BucketwisePlacement,
    DevicePlacement,
    bare_step,
    hypers_of,
    stepping_class,
    steps_params_apart,
)

__all__ = ["DevicePlacement", "ParamState", "Placement", "bare_step", "build_placement", "check_policy", "hypers_of"]


def check_policy(policy: object) -> None:
    """Raise ConfigTypeError unless ``policy`` is one this version can place."""
    if policy is not None:
        raise ConfigTypeError(f"offload must be None, got {policy!r}")


def build_placement(
    policy: None,  # noqa: ARG001  (the only policy so far)
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    params: Sequence[Tensor],
) -> Placement:
    """The strategy a policy names; ``None`` is the parameters' own device.

    Args:
        params: the parameters known so far.
    """
    strategy = BucketwisePlacement if steps_params_apart(optimizer_class) else DevicePlacement
    return strategy(stepping_class(optimizer_class, defaults, params), defaults)
