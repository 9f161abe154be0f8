"""Plain ``torch.optim`` state dicts: whether one fits, and the slice of one parameter's full-shape tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..errors import StateDictError, quoted
from ..field_checks import plain_number
from ..kernels.adam_state import MAXIMUM, STORED_KEYS
from ..kernels.checks import may_be_count, oddity
from ..kernels.strides import resolved
from ..kernels.table import NATIVE_CLASSES
from ..layout import ParamSlice
from ..placement.native_rules import COLUMN_KEYS
from ..placement.selective.columns import check_columns
from ..sharding.flat_param import FlatParam, is_dtensor
from ..sharding.param_groups import hypers_of
from ..sharding.wrapped_class import needs_closure, steps_params_apart
from ..system.garbage_collection import without_collection
from ..system.interrupts import uninterrupted
from ..system.log import log
from .trial import is_known, state_after_a_step, trial_of
from .usual_states import UsualStates, are_usual, columns_of_alike

StateDict = dict[str, Any]
# State by global parameter index.
StatesByIndex = dict[int, dict[str, Any]]

_AS_RAISED = nullcontext()


def pack_groups(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return param groups with their parameters replaced by global indices, as ``torch.optim`` numbers them.

    Tensors among the hyperparameters (an ``lr``, say) are copied.
    """
    packed, start = [], 0
    for group in param_groups:
        count = len(group["params"])
        packed.append(
            {**{k: apart(v) for k, v in group.items() if k != "params"}, "params": list(range(start, start + count))}
        )
        start += count
    return packed


def apart(value: Any, device: torch.device | None = None) -> Any:
    """Return ``value`` with copies of its tensors, on ``device`` if given, and Python's own numbers for others."""
    if isinstance(value, Tensor):
        return value.detach().clone().to(device)
    return type(value)(apart(part, device) for part in value) if type(value) in (tuple, list) else plain_number(value)


class Refused:
    """The parts of a state dict that do not fit. Each is an error at once, or, ``strict=False``, left out.

    Attributes:
        left_out: why each part was left out.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict, self.left_out = strict, list[str]()

    def each(self) -> AbstractContextManager[None]:
        """Refuse one parameter's state if its checks, made within it, fail."""
        return _AS_RAISED if self._strict else self._left_out()

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        try:
            yield
        except StateDictError as error:
            self.left_out.append(str(error))

    def complete(self, saved: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a saved group; under ``strict=False`` the optimizer's own values stand for those it lacks."""
        return saved if self._strict else {**hypers_of(group), **saved}

    def for_class(
        self, state_dict: StateDict, states: Mapping[int, Any], param_groups: Sequence[Mapping[str, Any]]
    ) -> StateDict:
        """Return the state dict for the wrapped class itself, a copy.

        Args:
            states: the states that fit, by global index.
        """
        if self._strict:
            saved_ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
            fitting = {saved_ids[index]: state for index, state in states.items()}
            return {**state_dict, "state": copied({**state_dict["state"], **fitting})}
        numbers = [group["params"] for group in pack_groups(param_groups)]
        saved = [self.complete(*pair) for pair in zip(state_dict["param_groups"], param_groups, strict=True)]
        packed = [{**group, "params": ids} for group, ids in zip(saved, numbers, strict=True)]
        ids = {saved_id for group in state_dict["param_groups"] for saved_id in group["params"]}
        besides: dict[Any, Any] = {
            key: kept for key, kept in state_dict["state"].items() if isinstance(key, str) and key not in ids
        }
        return {**state_dict, "state": copied({**besides, **states}), "param_groups": packed}

    def say(self, states: Mapping[int, Any], params: Sequence[Tensor], describe: Callable[[int], str]) -> None:
        """Log what was left out, and which parameters start afresh although state of others was loaded."""
        if self.left_out:
            log.warning("load_state_dict() has left out what does not fit: %s", "; ".join(self.left_out))
        fresh = [index for index, param in enumerate(params) if param.requires_grad and index not in states]
        if states and fresh:
            log.warning(
                "load_state_dict() was given no state for %d of %d parameters, the first of them %s; they start afresh",
                len(fresh),
                len(params),
                describe(fresh[0]),
            )


def match(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    elementwise: bool,
    refused: Refused,
    *,
    whole: bool,
    native: bool = False,
) -> dict[int, Mapping[str, Any]]:
    """Return the loaded state by global parameter index, after checks that all of it fits.

    Args:
        elementwise: every state tensor must have its parameter's shape or be a scalar.
        refused: takes errors in the state of single parameters.
        whole: the wrapped class itself loads the state dict.
        native: what is stepped for a parameter, and by what, may be taken out of the state.

    Raises:
        StateDictError: names the first thing that does not fit; nothing has been changed.
    """
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"a state dict is a dict, got {type(state_dict).__name__}")
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise StateDictError(f"the state dict has no {key!r} (it has {sorted(map(str, state_dict))})")
    _require_kind("'state' of the state dict", state_dict["state"], Mapping, "dict")
    index_of = _numbered(state_dict["param_groups"], param_groups)
    params = [param for group in param_groups for param in group["params"]]
    ids, given = [*state_dict["state"]], [*state_dict["state"].values()]
    if index_of.keys() >= set(ids) and are_usual(given, [params[index_of[saved_id]] for saved_id in ids]):
        return UsualStates(zip(map(index_of.__getitem__, ids), given, strict=True))
    matched: dict[int, Mapping[str, Any]] = {}
    for saved_id, state in state_dict["state"].items():
        with refused.each():
            if whole and _is_extra_state(saved_id, index_of):
                continue
            if saved_id not in index_of:
                raise StateDictError(f"the state dict has state for parameter {saved_id!r}, which is in no param group")
            index = index_of[saved_id]
            _require_kind(f"the state of parameter {index}", state, Mapping, "dict")
            _check_values(index, state, whole=whole, takes_wrappers=whole and not elementwise)
            _check_shapes(index, state, params[index], elementwise=elementwise, native=native)
            matched[index] = _materialized(state, in_full=whole and not is_dtensor(params[index]))
    return matched


def _is_extra_state(saved_id: Any, index_of: Mapping[Any, int]) -> bool:
    """Return whether this state belongs to the wrapped class and not to a parameter.

    A parameter's number as text (``"0"``) does not count as extra: a file whose keys are all text has such keys.
    """
    if not isinstance(saved_id, str) or saved_id in index_of:
        return False
    return not (saved_id.isdecimal() and int(saved_id) in index_of)


def _require_kind(name: str, value: Any, kinds: type | tuple[type, ...], noun: str) -> None:
    """Raise StateDictError unless a part of a state dict is of one of these types."""
    if not isinstance(value, kinds):
        raise StateDictError(f"{name} is a {type(value).__name__}, not a {noun}")


def _materialized(state: Mapping[str, Any], *, in_full: bool) -> Mapping[str, Any]:
    """Return the same state without lazy views: torch conjugates or negates those of ``conj()`` when it reads them.

    Args:
        in_full: gather DTensors, which is collective over their meshes.
    """

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return resolved(value.full_tensor() if in_full and is_dtensor(value) else value)  # type: ignore[attr-defined]

    made = {key: plain(value) for key, value in state.items()}
    return made if any(made[key] is not value for key, value in state.items()) else state


def _numbered(saved_groups: Any, param_groups: Sequence[Mapping[str, Any]]) -> dict[Any, int]:
    """Return global indices by saved id; ids stand for parameters by position."""
    _require_kind("'param_groups' of the state dict", saved_groups, (list, tuple), "list")
    if len(saved_groups) != len(param_groups):
        raise StateDictError(f"the state dict has {len(saved_groups)} param groups, the optimizer {len(param_groups)}")
    index_of: dict[Any, int] = {}
    params: list[Tensor] = []
    for number, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        _require_kind(f"param group {number} of the state dict", saved, Mapping, "dict")
        if "params" not in saved:
            raise StateDictError(f"param group {number} of the state dict has no 'params'")
        ids = saved["params"]
        _require_kind(f"'params' of param group {number} of the state dict", ids, (list, tuple), "list")
        if len(ids) != len(group["params"]):
            raise StateDictError(
                f"param group {number} has {len(ids)} parameters in the state dict and {len(group['params'])} in the "
                "optimizer"
            )
        if {*map(type, ids)} == {int} and len({*ids}) == len(ids) and index_of.keys().isdisjoint(ids):
            index_of.update(zip(ids, count(len(params))))
            params += group["params"]
            continue
        for saved_id, param in zip(ids, group["params"], strict=True):
            if not isinstance(saved_id, Hashable):
                raise StateDictError(f"param group {number} of the state dict has {saved_id!r} for a parameter")
            if saved_id in index_of and params[index_of[saved_id]] is not param:
                raise StateDictError(f"the state dict lists parameter {saved_id!r} twice")
            index_of.setdefault(saved_id, len(params))
            params.append(param)
    return index_of


def _check_values(index: int, state: Mapping[str, Any], *, whole: bool, takes_wrappers: bool) -> None:
    """Raise StateDictError for what cannot be compared, cut, copied, or counted on from.

    Args:
        takes_wrappers: the class may keep tensors that are made of other tensors.
    """
    for key, value in state.items():
        if key in STORED_KEYS and isinstance(value, Tensor) and not value.is_floating_point():
            raise StateDictError(
                f"state {key!r} of parameter {index} was saved with sharded_state_dict(opt, compact=True); load it "
                "with zero_opt.load_sharded_state_dict()"
            )
        if not (whole or is_plain(key)):
            raise StateDictError(
                f"the state of parameter {index} has the key {quoted(key)}, a {type(key).__name__}, which cannot "
                "be sent to other ranks; use strings or numbers"
            )
        if isinstance(value, Tensor) and not (takes_wrappers and hasattr(value, "__tensor_flatten__")):
            _require_dense(index, key, value)
        if key == "step" and not may_be_count(value):
            raise StateDictError(f"state 'step' of parameter {index} is {quoted(value)}, not a number of steps")


def is_plain(value: object) -> bool:
    """Return whether JSON carries a value from rank to rank, so that it can be a key of state, or a value."""
    return value is None or isinstance(value, (bool, int, float, str))


def _require_dense(index: int, key: object, value: Tensor) -> None:
    """Raise StateDictError unless a tensor has elements in memory, of a dtype that torch can cast, or is a DTensor."""
    odd = None if is_dtensor(value) else oddity(value)
    if odd is not None:
        raise StateDictError(f"state {key!r} of parameter {index} is {odd}, not a dense tensor with values")


def _check_shapes(index: int, state: Mapping[str, Any], param: Tensor, *, elementwise: bool, native: bool) -> None:
    """Raise StateDictError for tensors of which a slice of the parameter would have no part."""
    wrong = check_columns(state, param.shape)
    if wrong is not None:
        raise StateDictError(f"parameter {index}: {wrong}")
    for key, value in state.items():
        if native and (key == "master" or (key == MAXIMUM and not param.is_complex())):
            if not (isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.shape):
                raise StateDictError(
                    f"state {key!r} of parameter {index} is {_in_short(value)}, not a floating-point tensor of the "
                    f"parameter's shape {tuple(param.shape)}"
                )
        elif not (isinstance(value, Tensor) and elementwise and value.dim()) or key in COLUMN_KEYS:
            continue
        elif value.shape != param.shape and value.numel() != 1:
            raise StateDictError(
                f"state {key!r} of parameter {index} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}"
            )


def _in_short(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else quoted(value)


def fitted(
    states: Mapping[int, Mapping[str, Any]],
    param_groups: Sequence[Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
    optimizer_class: type[torch.optim.Optimizer],
    refused: Refused,
    defaults: Mapping[str, Any],
) -> tuple[dict[int, Mapping[str, Any]], list[dict[str, Any]]]:
    """Refuse state and hyperparameters that a step of ``optimizer_class`` could not use, for torch's classes.

    Other classes are not tried out: a step of theirs might do anything.

    Args:
        states: by global parameter index; a parameter without any state is new.
        refused: takes errors in the state of single parameters. defaults: what the optimizer was constructed with.

    Returns:
        The states that fit; and per group the hyperparameters, as the class completes those of older versions.

    Raises:
        StateDictError: names the first thing that does not fit.
    """
    given = [refused.complete(*pair) for pair in zip(saved_groups, param_groups, strict=True)]
    if not steps_params_apart(optimizer_class):
        return dict(states), [hypers_of(saved) for saved in given]
    fitting, completed, index = dict(states), [], 0
    for number, (group, saved) in enumerate(zip(param_groups, given, strict=True)):
        hypers = _completed(optimizer_class, saved, number, group["params"], {**hypers_of(group), **defaults})
        completed.append(hypers)
        made: dict[Any, Mapping[str, Any]] = {}
        fit: set[Any] = set()  # shape, dtype and device of parameters whose state is known to fit
        for param in group["params"]:
            place = (param.shape, param.dtype, param.device)
            if states.get(index) and place not in fit:
                small = torch.Size([min(size, 2) for size in param.shape] or [2])
                # The native classes show state of every parameter as that of an fp32 one.
                dtype = torch.float32 if optimizer_class in NATIVE_CLASSES else param.dtype
                kind = (small, dtype, param.device)
                if kind not in made:
                    like = torch.zeros(small, dtype=dtype, device=tried_on(optimizer_class, param))
                    made[kind] = state_after_a_step(optimizer_class, hypers, like)
                fitting.pop(index)
                with refused.each():
                    _require_like(made[kind], states[index], index, param.shape, small)
                    fitting[index] = _with_count(states[index])
                    if isinstance(states, UsualStates):
                        fit.add(place)
            index += 1
    return fitting, completed


@uninterrupted()  # what a signal handler raises is not the class's refusal
def _completed(
    cls: type[torch.optim.Optimizer],
    saved: Mapping[str, Any],
    number: int,
    params: Sequence[Tensor],
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a saved group's hyperparameters, once the class has checked, completed, and made a step with them.

    Args:
        own: hyperparameters that the class accepts.
    """
    hypers, name = copy.deepcopy(hypers_of(saved)), cls.__name__
    device = tried_on(cls, params[0]) if params else None
    missing: list[str] = []
    try:
        trial = trial_of(cls, hypers, own, torch.zeros(2, 2, device=device, dtype=torch.float32))
        needed = trial.hypers
        own_state = trial.optimizer.state_dict()["state"]  # a class may make it in its constructor alone
        trial.optimizer.load_state_dict({"state": own_state, "param_groups": [{**hypers, "params": [0]}]})
        completed = trial.hypers
        missing = [key for key in needed if key not in completed]
        trial.step((lambda: 0.0) if needs_closure(cls) else None)  # a class may do without a key
    except Exception as error:
        if missing:
            raise StateDictError(
                f"param group {number} of the state dict has no {missing[0]!r}, which {name} needs"
            ) from error
        raise StateDictError(f"{name} refuses param group {number} of the state dict, {hypers}: {error}") from error
    return completed


def first_state(
    optimizer_class: type[torch.optim.Optimizer], hypers: Mapping[str, Any], param: Tensor, stepped: torch.dtype
) -> dict[str, tuple[Any, torch.Size]]:
    """Find out, by a step of a small parameter, what state a parameter will have after its first step.

    Args:
        stepped: dtype of what is stepped for the parameter, a master if that is not the parameter's.

    Returns:
        Per key a value, and the shape that the value has for the parameter. Empty if the class cannot be tried out.
    """
    if not is_known(optimizer_class):
        return {}
    small = torch.Size([min(size, 2) for size in param.shape] or [2])
    like = torch.zeros(small, dtype=stepped, device=tried_on(optimizer_class, param))
    made = dict(state_after_a_step(optimizer_class, hypers, like))
    if stepped is not param.dtype:
        made["master"] = like
    return {
        key: (value, _grown(value.shape, small, param.shape) if isinstance(value, Tensor) else torch.Size([]))
        for key, value in made.items()
    }


def tried_on(cls: type[torch.optim.Optimizer], param: Tensor) -> torch.device:
    """Return where a class is tried for a parameter: the native classes step host memory alone, wherever that is."""
    return torch.device("cpu") if cls in NATIVE_CLASSES else param.device


def _require_like(
    made: Mapping[str, Any], state: Mapping[str, Any], index: int, shape: torch.Size, small: torch.Size
) -> None:
    """Raise StateDictError unless a parameter's loaded state is like that which the class makes for shape ``small``."""
    for key, model in made.items():
        if key not in state:
            raise StateDictError(
                f"state {key!r} of parameter {index} is missing: the class needs {sorted(made)}, the state dict has "
                f"{sorted(map(str, state))}"
            )
        value = state[key]
        if not isinstance(model, Tensor):
            continue
        if not isinstance(value, Tensor):
            if model.dim() or isinstance(value, bool) or not isinstance(value, (int, float)):
                raise StateDictError(f"state {key!r} of parameter {index} is a {type(value).__name__}, not a tensor")
            continue
        if type(value) is not Tensor:  # match() lets tensors that are made of others pass
            _require_dense(index, key, value)
        if value.is_complex() > model.is_complex() or (model.dim() and _kind_of(value.dtype) != _kind_of(model.dtype)):
            raise StateDictError(
                f"state {key!r} of parameter {index} is {value.dtype}, which {model.dtype} cannot be made of; load "
                "what this class saved"
            )
        expected = _grown(model.shape, small, shape)
        if value.shape != expected:
            raise StateDictError(
                f"state {key!r} of parameter {index} has shape {tuple(value.shape)}; the parameter's shape "
                f"{tuple(shape)} calls for {tuple(expected)}"
            )


def _with_count(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state in whose step count every class can count on: torch's add one to fp32 and fp64 in all forms.

    Other dtypes they cannot add to, in one form of the step or another, or their counts soon come to an end.
    """
    step = state.get("step")
    if not isinstance(step, Tensor) or step.dtype in (torch.float32, torch.float64):
        return state
    return {**state, "step": step.detach().double()}


def _kind_of(dtype: torch.dtype) -> tuple[bool, bool]:
    """Return a dtype's kind. Loads cast between dtypes of one kind."""
    return dtype.is_floating_point, dtype.is_complex


def _grown(of_small: torch.Size, small: torch.Size, shape: torch.Size) -> torch.Size:
    """Return a state tensor's shape for a parameter of ``shape``, given its shape for one of shape ``small``."""
    if of_small == small:
        return shape
    if len(of_small) != len(small):
        return of_small
    return torch.Size([full if got == had else got for got, had, full in zip(of_small, small, shape, strict=False)])


def cut(state: Mapping[str, Any], piece: ParamSlice, flat: FlatParam) -> dict[str, Any]:
    """Return a copy of the part of one parameter's full-shape state that belongs to a slice."""
    whole = piece.in_param.numel == flat.numel
    part: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            part[key] = value
        elif whole or value.shape != flat.shape:
            part[key] = value.detach().clone()
        else:
            run = flat.flatten(value.detach())
            part[key] = run[piece.in_param.start : piece.in_param.stop].clone()
    return part


@without_collection()
def copied(state: Mapping[int, Mapping[str, Any]], device: torch.device | None = None) -> StatesByIndex:
    """Return a copy of state, its tensors on ``device`` if one is given."""
    if device is None and (columns := columns_of_alike([*state.values()])):
        with torch.no_grad():
            copies = zip(*(map(Tensor.clone, column) for column in columns.values()), strict=True)
            return {index: dict(zip(columns, values, strict=True)) for index, values in zip(state, copies, strict=True)}
    return {index: {key: apart(value, device) for key, value in entry.items()} for index, entry in state.items()}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype for :func:`torch_dtype`."""
    return str(dtype)


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype whose ``str()`` is ``name``, such as ``"torch.float32"``."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
