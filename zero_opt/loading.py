"""What is checked of a full state dict, on all ranks, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .construction import check_options, is_elementwise
from .errors import StateDictError, UnsupportedOptimizer
from .placement import check_state
from .state_dict import Refused, StateDict, fitted, match
from .wiring import Recipe, Wiring

Checked = tuple[dict[int, Mapping[str, Any]], list[dict[str, Any]], Refused]


def checked_load(
    optimizer: torch.optim.Optimizer, recipe: Recipe, parts: Wiring | None, saved: StateDict, *, strict: bool
) -> Checked:
    """State per global index and hyperparameters per group that the optimizer can take. Collective if there are parts.

    A step that is under way ends first.

    Args:
        strict: whether what does not fit is an error, or left out.

    Raises:
        StateDictError: on every rank, naming what does not fit on one.
    """
    cls, refused = recipe.optimizer_class, Refused(strict=strict)
    error: Exception | None = None
    states: dict[int, Mapping[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    try:
        states = match(saved, optimizer.param_groups, is_elementwise(cls), refused)
        if parts is not None:
            check_options(saved["param_groups"])
        states, groups = fitted(states, optimizer.param_groups, saved["param_groups"], cls, refused)
        if parts is not None:
            check_state(recipe.offload, recipe.precision, cls, groups, states)
            parts.placement.wait()
    except UnsupportedOptimizer as found:
        error = StateDictError(f"in the state dict, {found}")
    except Exception as found:  # whatever it is, the other ranks must not wait for this one
        error = found
    if parts is not None:
        parts.agreement.raise_first_error(error, "load_state_dict()")
    if error is not None:
        raise error
    return states, groups, refused
