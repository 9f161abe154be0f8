"""Checks of a full state dict, on all ranks, before any of it is loaded, and places to load it into."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.groups import AloneGroup, Group
from ..errors import ConfigTypeError, StateDictError, UnsupportedOptimizer
from ..kernels import CPUAdam, CPUAdamW
from ..kernels.adam_state import HALVES
from ..placement import check_state, extra_places, home_of, is_by_columns, taken_states
from ..sharding.flat_param import is_dtensor
from ..sharding.wrapped_class import is_elementwise, needs_closure
from ..state.full_state import require_importable
from ..state.state_dict import Refused, StateDict, first_state, fitted, match
from ..state.trial import is_known
from .config import Recipe
from .contents import check_options
from .dtensors.mesh_params import state_like
from .engine import Wiring
from .offload_state import Parked

States = dict[int, Mapping[str, Any]]

_log = logging.getLogger("zero_opt")

_LOADER = "torch.distributed.checkpoint.state_dict_loader"


def asked_by_load() -> bool:
    """Return whether ``torch.distributed.checkpoint.load`` has called the ``state_dict()`` that calls this function.

    ``load`` calls it for tensors to load into, and silently skips state that it finds no place for. Other
    ``state_dict()`` methods may come in between.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_name == "state_dict" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == _LOADER


def places(recipe: Recipe, group: Group, hypers: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return tensors to load a parameter's state into: cut by rows over ``group``, or as its DTensor is."""
    require_importable()
    from ..state.row_sharded import blank  # takes seconds to import, and few need it

    hypers = {key: value for key, value in hypers.items() if key not in ("params", "param_names")}
    home = home_of(recipe.offload, recipe.precision, param)
    if is_dtensor(param):
        return state_like(recipe, hypers, param, home[0])
    made = first_state(recipe.optimizer_class, hypers, param, home[0])
    if is_by_columns(recipe.offload, param):
        made |= extra_places(param)
    return {
        key: blank(value, param, shape, group) if isinstance(value, Tensor) else value
        for key, (value, shape) in made.items()
    }


def add_places(state_dict: StateDict, param_groups: Sequence[Mapping[str, Any]], recipe: Recipe) -> None:
    """Give trainable parameters without state a place to load it into, in full shape, or as a DTensor is cut.

    Raises:
        StateDictError: what the class keeps is not known before its first step.
    """
    cls, state = recipe.optimizer_class, state_dict["state"]
    for packed, group in zip(state_dict["param_groups"], param_groups, strict=True):
        for index, param in zip(packed["params"], group["params"], strict=True):
            if not param.requires_grad or index in state:
                continue
            if needs_closure(cls) or not is_known(cls):
                raise StateDictError(
                    f"torch.distributed.checkpoint.load() would load no state of parameter {index}, because what "
                    f"{cls.__name__} keeps is not known before its first step; if it is elementwise, see "
                    "zero_opt.register_elementwise(), else give opt.load_state_dict() a full state dict"
                )
            made = places(recipe, AloneGroup(), packed, param)
            if made:
                state[index] = made


def entry_of(state: Mapping[Any, Mapping[str, Any]], index: int) -> Mapping[str, Any]:
    """Return one parameter's state. Of that, torch puts what is no tensor under the number as text, as in a path."""
    return {**state.get(index, {}), **state.get(str(index), {})}


def joined(saved: Any) -> Any:
    """Return a state dict with one entry per parameter, where torch has split entries as in :func:`entry_of`."""
    state = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        return saved
    texts = {str(key): key for key in state if isinstance(key, int) and str(key) in state}
    if not texts:
        return saved
    entries = {key: entry for key, entry in state.items() if key not in texts}
    return {**saved, "state": entries | {index: entry_of(state, index) for index in texts.values()}}


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
            StateDictError: on every rank, naming what does not fit on one. StateOffloaded, StorageFailed: likewise.
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
        states = match(saved, groups, is_elementwise(cls), self.refused, whole=parts is None)
        if parts is not None:
            check_options(saved["param_groups"])
        self.states, self.groups = fitted(states, groups, saved["param_groups"], cls, self.refused)
        if parts is not None:
            self.states = taken_states(self._recipe.offload, self.states)
            check_state(self._recipe.offload, self._recipe.precision, cls, self.groups, self.states)
            parts.placement.wait()
            parts.placement.require_writable()

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
