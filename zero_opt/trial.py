"""An optimizer class tried out on a few zeros: what it makes of hyperparameters, and of a step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .construction import is_elementwise
from .placement import bare_step, hypers_of, steps_params_apart


def is_known(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether a step of the class on zeros of its own tells of any parameter: torch's classes and registered ones."""
    return steps_params_apart(cls) or is_elementwise(cls)


class Trial:
    """One parameter under an optimizer of its own.

    Args:
        like: the parameter's values; its memory is used. hypers: of its param group.
        **arguments: the class's own. What it says of them, and of ``hypers``, it raises.
    """

    def __init__(
        self, cls: type[torch.optim.Optimizer], like: Tensor, hypers: Mapping[str, Any], **arguments: Any
    ) -> None:
        self.param = torch.nn.Parameter(like, requires_grad=False)
        self.optimizer = cls([{**hypers, "params": [self.param]}], **arguments)

    @property
    def hypers(self) -> dict[str, Any]:
        """The hyperparameters as the class has completed them."""
        return hypers_of(self.optimizer.param_groups[0])

    @property
    def state(self) -> Mapping[str, Any]:
        """The parameter's live state; empty if it has none."""
        found: Mapping[str, Any] = self.optimizer.state.get(self.param, {})
        return found

    def step(self) -> None:
        """One step with a gradient of zeros, of a kind that the class takes."""
        layout = torch.sparse_coo if isinstance(self.optimizer, torch.optim.SparseAdam) else torch.strided
        self.param.grad = torch.zeros_like(self.param, layout=layout)
        try:
            bare_step(self.optimizer)
        finally:
            self.param.grad = None


def state_after_a_step(cls: type[torch.optim.Optimizer], hypers: Mapping[str, Any], like: Tensor) -> Mapping[str, Any]:
    """The state that a parameter gets; empty where the class cannot step it like this (without a closure, say)."""
    try:
        trial = Trial(cls, like, copy.deepcopy(hypers))
        trial.step()
    except Exception:  # whatever a class raises
        return {}
    return trial.state
