"""What the native step can be asked for, whichever placement takes it away from the parameters' device."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StateDictError, UnsupportedOptimizer, UnsupportedParam, quoted
from ..field_checks import is_on
from ..kernels.adam_state import HALVES, MAXIMUM
from ..kernels.checks import is_number_of_steps, lacks_memory, oddity
from ..kernels.functions import ADAM
from ..kernels.native_optimizer import torch_class_of
from ..kernels.table import NATIVE_CLASSES, UPDATES
from ..kernels.updates import NativeUpdate, given_arrays
from ..sharding.flat_param import FlatParam
from ..system.extension import require_native
from ..system.log import log

ADAM_CLASSES = tuple(cls for cls, update in UPDATES.items() if update is ADAM)
# State of parameters that are stepped by columns, which a plain optimizer has no use for.
COLUMN_KEYS = COLUMN_STEPS, COLUMN_SELECTED, WAITING, WINDOW = "column_steps", "column_selected", "waiting", "window"
_OTHERWISE = "with offload=None any class and option is stepped by the class itself"
_IN_PROCESS = f"{_OTHERWISE}, and CPUOffload() takes any class"


def check_groups(
    policy: str,
    cls: type[torch.optim.Optimizer],
    groups: Iterable[Mapping[str, Any]],
    classes: Collection[type[torch.optim.Optimizer]] = UPDATES,
) -> None:
    """Raise UnsupportedOptimizer or NativeUnavailable unless these param groups can be stepped natively.

    Args:
        policy: the name of the policy that is to do so. classes: those that it takes.
    """
    require_native()
    if cls not in classes:
        names = ", ".join(known.__name__ for known in classes)
        raise UnsupportedOptimizer(f"{policy} steps {names}, not {cls.__name__}; {_IN_PROCESS}")
    for number, group in enumerate(groups):
        check_fused(policy, number, group)
        if group.get("fused") is None:
            say_fused(policy, cls.__name__)


def check_fused(policy: str, number: int, group: Mapping[str, Any]) -> None:
    """Raise UnsupportedOptimizer if a param group asks for bits that the native step has not."""
    if group.get("fused") is False or is_on(group.get("foreach")):
        raise UnsupportedOptimizer(
            f"group {number} has fused={group.get('fused')!r}, foreach={group.get('foreach')!r}, and {policy} "
            f"has the bits of fused=True alone; leave both out of that group, or {_OTHERWISE}"
        )


def new_roles(
    policy: str, update: NativeUpdate, groups: Sequence[Mapping[str, Any]], placed: Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Return, per param group, which arrays a step has that have no place, as options may have been edited.

    Raises:
        UnsupportedOptimizer: as :func:`check_fused`.
    """
    for number, group in enumerate(groups):
        check_fused(policy, number, group)
    return [
        tuple(role for role in update.roles(group) if role not in known)
        for group, known in zip(groups, placed, strict=True)
    ]


def loaded_roles(
    update: NativeUpdate, groups: Sequence[Mapping[str, Any]], states: Iterable[tuple[int, Mapping[str, Any]]]
) -> list[tuple[str, ...]]:
    """Return, per param group, which arrays have places, given what was loaded for its parameters on this rank.

    Besides those that its step has, others that all states have: a later step may, by another option. An array that a
    state need not have (a momentum) has a place if any state has it.

    Args:
        states: each with the number of its group.
    """
    given: list[list[set[str]]] = [[] for _ in groups]
    for number, state in states:
        if state:
            given[number].append({*given_arrays(state, update.arrays)})
    free = {*update.arrays}.difference(update.needed(update.arrays))
    placed = [
        {*update.roles(group)}.union(set.intersection(*of) if of else (), free & set().union(*of))
        for group, of in zip(groups, given)
    ]
    return [tuple(role for role in update.arrays if role in roles) for roles in placed]


@functools.cache
def say_fused(policy: str, names: str, hint: str = "") -> None:
    """Log, once, that classes are stepped with other bits than the user may expect."""
    log.warning("%s steps %s as with fused=True, whose bits differ a little from the default's%s", policy, names, hint)


def require_native_dtype(policy: str, cls: type[torch.optim.Optimizer], param: Tensor, label: str) -> None:
    """Raise UnsupportedParam, naming it ``label``, for a parameter that cannot be stepped natively."""
    if param.dtype not in (torch.float32, *HALVES):
        otherwise = f"use {torch_class_of(cls)} with offload=None" if cls in NATIVE_CLASSES else _OTHERWISE
        raise UnsupportedParam(f"{label} is {param.dtype}; {policy} takes float32, bfloat16 and float16; {otherwise}")


def check_state(index: int, state: Mapping[str, Any], update: NativeUpdate) -> None:
    """Raise StateDictError unless the loaded state of a parameter is the update's, and has nothing else."""
    _require_known(f"the state of parameter {index}", state, update)
    for key in update.least:
        if state and key not in state:
            raise StateDictError(f"state {key!r} of parameter {index} is missing")


def without_column_keys(states: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """States for an optimizer that steps no columns, and must not save again what it did not keep."""
    return {
        index: {key: value for key, value in state.items() if key not in COLUMN_KEYS}
        if COLUMN_STEPS in state
        else state
        for index, state in states.items()
    }


def say_without_masters(count: int) -> None:
    """So many loaded parameters in bf16 or fp16 came without a master."""
    if count:
        log.warning("no master was saved for %d parameters: their own values are taken", count)


def require_fitting(
    flat: FlatParam, shape: torch.Size, state: Mapping[str, Any], update: NativeUpdate, roles: Sequence[str]
) -> None:
    """Raise StateDictError unless a state that the user has put in the place of another can be stepped.

    Args:
        shape: of this rank's slice of the parameter. state: of that slice, or in the parameter's shape; an empty one is
            new. roles: what a step of its group reads.
    """
    _require_known(f"opt.state of {flat.label}", state, update)
    require_complete(flat.label, state, update, roles)
    for key, value in state.items():
        if key in COLUMN_KEYS or (value is None and key not in update.needed(roles)):
            continue
        is_tensor = isinstance(value, Tensor)
        if key == "step":
            wanted, fits = "a number of steps", is_number_of_steps(value)
        else:
            part = f" or, of this rank's part alone, {tuple(shape)}" if shape != flat.shape else ""
            wanted = f"a floating-point tensor of shape {tuple(flat.shape)}{part}"
            dense = is_tensor and value.layout is torch.strided and not value.is_meta and not lacks_memory(value)
            fits = dense and value.is_floating_point() and value.shape in (shape, flat.shape)
        if not fits:
            odd = oddity(value) if is_tensor else None
            one = not is_tensor or (value.dim() == 0 and odd is None)
            given = quoted(value) if one else f"{value.dtype}"
            if not one and (key == "step" or value.shape not in (shape, flat.shape)):
                given += f" of shape {tuple(value.shape)}"  # else that is not why
            given += f", {odd}: not a dense tensor with values" if odd else ""
            raise StateDictError(f"opt.state of {flat.label}: {key!r} must be {wanted}, and is {given}")


def require_placed(label: str, state: Mapping[str, Any], update: NativeUpdate, roles: Collection[str]) -> None:
    """Raise StateDictError if a state that the user has edited has an array that its group has no option on for.

    Args:
        roles: which of the update's arrays have a place.
    """
    for role in given_arrays(state, update.arrays).keys() - {*roles}:
        raise StateDictError(
            f"opt.state of {label} has {role!r}, but {update.switches[role]} is off in its param group; switch that "
            f"on, or delete {role!r}"
        )


def _require_known(label: str, state: Mapping[str, Any], update: NativeUpdate) -> None:
    """Raise StateDictError if a state has keys that the placement has no place for."""
    known = (*update.keys, *COLUMN_KEYS)
    unknown = [key for key in state if key not in known]
    if unknown:
        raise StateDictError(
            f"{label} has {unknown[0]!r}, which has no place outside the parameters' device; keep it "
            "elsewhere, or use offload=None"
        )


def require_complete(label: str, state: Mapping[str, Any], update: NativeUpdate, roles: Sequence[str]) -> None:
    """Raise StateDictError if a state that the user has edited lacks what the next step needs; an empty one is new."""
    for key in update.needed(roles):
        if state and key not in state:
            hint = "amsgrad cannot be switched on after the first step, and " if key == MAXIMUM else ""
            raise StateDictError(f"opt.state of {label} has no {key!r}; {hint}an entry without a key cannot be stepped")
