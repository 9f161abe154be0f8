"""Checks of a full state dict, on all ranks, before any of it is loaded, and places to load it into."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from ..comm.alone_group import AloneGroup
from ..comm.groups import Group
from ..errors import ConfigConflict, StateDictError, UnsupportedOptimizer
from ..field_checks import check_flag
from ..kernels.adam_state import HALVES, SQUARES, require_squares
from ..kernels.native_optimizer import NativeOptimizer
from ..kernels.table import NATIVE_CLASSES
from ..placement.compact_state import is_compact
from ..placement.native_rules import ADAM_CLASSES
from ..sharding.flat_param import is_dtensor
from ..sharding.param_groups import hypers_of
from ..sharding.wrapped_class import is_elementwise, needs_closure, steps_params_apart
from ..state.full_state import require_importable
from ..state.state_dict import Refused, StateDict, first_state, fitted, match
from ..state.trial import is_known
from ..state.usual_states import UsualStates
from ..system.garbage_collection import without_collection
from ..system.log import log
from .arguments import check_options, loaded_groups
from .compact_rows import compact_places, compact_values
from .config import Config
from .dtensors.local_parts import check_own_part, local_of
from .dtensors.mesh_params import state_like

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


def places(
    config: Config, group: Group, packed: Mapping[str, Any], param: Tensor, *, compact: bool = False
) -> dict[str, Any]:
    """Return tensors to load a parameter's state into: cut by rows over ``group``, or as its DTensor is."""
    require_importable()
    from ..state.row_sharded import blank  # takes seconds to import, and few need it

    hypers, (dtype, _) = hypers_of(packed), config.placement.stepped_as(param)
    form = config.placement.inputs.form
    compact = compact and is_compact(form)
    if is_dtensor(param):
        like = state_like(config, hypers, param, dtype)
        return dict(compact_places(like, param, form)) if compact else like
    first = first_state(config.optimizer_class, hypers, param, dtype)
    if compact:
        first = dict(compact_values(first, param, form))
    made = {**first, **config.placement.column_places(param)}
    return {
        key: blank(value, param, shape, group) if isinstance(value, Tensor) else value
        for key, (value, shape) in made.items()
    }


def with_places(state_dict: StateDict, param_groups: Sequence[Mapping[str, Any]], config: Config) -> StateDict:
    """Return ``state_dict``, to which it adds places to load state into that trainable parameters lack.

    Places have the full shape, or are cut as a DTensor is.

    Raises:
        StateDictError: what the class keeps is not known before its first step.
    """
    cls, state = config.optimizer_class, state_dict["state"]
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
            if made := places(config, AloneGroup(), packed, param):
                state[index] = made
    return state_dict


def entry_of(state: Mapping[Any, Mapping[str, Any]], index: int) -> Mapping[str, Any]:
    """Return one parameter's state. torch puts values that are no tensors under the number as text, as in a path."""
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


class Loaded(NamedTuple):
    """A checked state dict.

    Attributes:
        states: those that fit, by global index. groups: the hyperparameters of each group.
        refused: the parts that do not fit.
    """

    states: dict[int, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    refused: Refused

    def say(self, config: Config, params: Sequence[Tensor], describe: Callable[[int], str]) -> None:
        """Log which parameters start afresh, and which lose bits of a master."""
        self.refused.say(self.states, params, describe)
        if config.has_masters or issubclass(config.optimizer_class, NativeOptimizer):
            return
        rounded = [index for index, state in self.states.items() if "master" in state and params[index].dtype in HALVES]
        if rounded:
            log.warning(
                "masters were saved for %d parameters, the first of them %s, and this optimizer keeps none: it goes on "
                "from the rounded parameters, with state cast to their dtype. "
                "precision=MixedPrecision(master_dtype=torch.float32) goes on from the masters",
                len(rounded),
                describe(rounded[0]),
            )


@without_collection()
def fitted_state(
    saved: StateDict, param_groups: Sequence[Mapping[str, Any]], config: Config, *, strict: bool, whole: bool
) -> Loaded:
    """Return the part of a full state dict that can be loaded.

    Args:
        whole: the wrapped class itself will load it; else the placement.

    Raises:
        StateDictError: names what does not fit. ConfigTypeError: ``strict`` is no bool.
    """
    check_flag("strict", strict)
    cls, refused = config.optimizer_class, Refused(strict=strict)
    try:
        native = config.has_masters or cls in (NATIVE_CLASSES if whole else ADAM_CLASSES)
        states = match(saved, param_groups, is_elementwise(cls), refused, whole=whole, native=native)
        if not whole:
            check_options(saved["param_groups"])
        fitting, groups = fitted(states, param_groups, saved["param_groups"], cls, refused, config.defaults)
        if not (whole or steps_params_apart(cls)):
            groups = loaded_groups(cls, groups, param_groups, config.defaults)
        loaded = [{**group, **hypers} for group, hypers in zip(param_groups, groups, strict=True)]
        config.placement.check_hypers(loaded)
        loadable = fitting if whole else config.placement.loadable(fitting)
        fitting = _taken(type(states)(loadable), config, refused, whole=whole)
        return Loaded(type(states)(fitting), groups, refused)  # some of the usual states are usual too
    except (UnsupportedOptimizer, ConfigConflict) as error:
        raise StateDictError(f"in the state dict, {error}") from error


def _taken(
    states: Mapping[int, Mapping[str, Any]], config: Config, refused: Refused, *, whole: bool
) -> dict[int, Mapping[str, Any]]:
    """Return the states that the placement takes, or the wrapped class itself."""
    if isinstance(states, UsualStates) and config.optimizer_class not in NATIVE_CLASSES:
        first = next(iter(states.items()), None)  # of plain tensors under the same keys as in all others
        with suppress(StateDictError):
            if first and first[1]:
                if not whole:
                    config.placement.check_state(*first)
                return states
    taken = dict[int, Mapping[str, Any]]()
    for index, state in states.items():
        with refused.each():
            for key, value in state.items():
                if isinstance(value, Tensor) and is_dtensor(value):
                    check_own_part(value, f"state {key!r} of parameter {index}")
            for key in SQUARES if config.optimizer_class in NATIVE_CLASSES else ():
                if isinstance(state.get(key), Tensor):
                    require_squares(f"state {key!r} of parameter {index}", local_of(state[key]))
            if not whole:
                config.placement.check_state(index, state)
            if state or whole:  # an empty one is none: the parameter has not been stepped
                taken[index] = state
    return taken
