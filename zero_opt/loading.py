"""What is checked of a full state dict, on all ranks, before anything of it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .construction import check_options, is_elementwise
from .cpu_adam import CPUAdam, CPUAdamW
from .errors import ConfigTypeError, StateDictError, UnsupportedOptimizer
from .parked import Parked
from .placement import check_state, taken_states
from .placement.master_shard import HALVES
from .recipe import Recipe
from .state_dict import Refused, StateDict, fitted, match
from .wiring import Wiring

States = dict[int, Mapping[str, Any]]

_log = logging.getLogger("zero_opt")


class Loading:
    """A load of ``saved`` into an optimizer.

    Attributes:
        states: what fits, by global index. groups: the hyperparameters of each group. refused: what does not fit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, recipe: Recipe, saved: StateDict, *, strict: bool) -> None:
        self._optimizer, self._recipe, self._saved, self._strict = optimizer, recipe, saved, strict
        self.states: States = {}
        self.groups: list[dict[str, Any]] = []
        self.refused = Refused(strict=strict)

    def check(self, parts: Wiring | None, parked: Parked) -> None:
        """See what there is of state and hyperparameters that fits. Collective if there are parts.

        A step that is under way ends first.

        Raises:
            ParamsReplaced: on every rank, if the user has replaced parameters on one.
            StateDictError: on every rank, naming what does not fit on one. StateOffloaded: likewise.
        """
        error: Exception | None = None
        try:
            if parts is not None:
                parts.planned.require()
            parked.require_here()
            if not isinstance(self._strict, bool):
                raise ConfigTypeError(f"strict must be True or False, got {self._strict!r}")
            self._check(parts)
        except UnsupportedOptimizer as found:
            error = StateDictError(f"in the state dict, {found}")
        except Exception as found:  # whatever it is, the other ranks must not wait for this one
            error = found
        if parts is not None:
            parts.agreement.raise_first_error(error, "load_state_dict()")
        if error is not None:
            raise error

    def _check(self, parts: Wiring | None) -> None:
        cls, groups, saved = self._recipe.optimizer_class, self._optimizer.param_groups, self._saved
        states = match(saved, groups, is_elementwise(cls), self.refused)
        if parts is not None:
            check_options(saved["param_groups"])
        self.states, self.groups = fitted(states, groups, saved["param_groups"], cls, self.refused)
        if parts is not None:
            self.states = taken_states(self._recipe.offload, self.states)
            check_state(self._recipe.offload, self._recipe.precision, cls, self.groups, self.states)
            parts.placement.wait()

    def say(self, params: Sequence[Tensor], describe: Callable[[int], str]) -> None:
        """Log what starts afresh, and what is loaded with fewer bits than were saved."""
        self.refused.say(self.states, params, describe)
        if self._recipe.has_masters or issubclass(self._recipe.optimizer_class, (CPUAdam, CPUAdamW)):
            return
        rounded = [index for index, state in self.states.items() if "master" in state and params[index].dtype in HALVES]
        if rounded:
            _log.warning(
                "masters were saved for %d parameters, the first of them %s, and this optimizer keeps none: it goes on "
                "from the rounded parameters, with state cast to their dtype. "
                "precision=MixedPrecision(master_dtype=torch.float32) goes on from the masters",
                len(rounded),
                describe(rounded[0]),
            )
