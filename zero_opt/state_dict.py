"""Between this rank's live state and a plain ``torch.optim`` state dict with full-shape tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import StateDictError
from .flat_param import FlatParam
from .layout import ParamSlice
from .placement import bare_step, hypers_of

StateDict = dict[str, Any]


def pack_groups(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Param groups with their parameters replaced by global indices, as ``torch.optim`` numbers them."""
    packed, start = [], 0
    for group in param_groups:
        count = len(group["params"])
        packed.append(
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(range(start, start + count))}
        )
        start += count
    return packed


def match(
    state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], elementwise: bool
) -> dict[int, Mapping[str, Any]]:
    """The loaded state per global parameter index, after checking that all of it fits.

    Args:
        elementwise: every state tensor must have its parameter's shape or be a scalar.

    Raises:
        StateDictError: names the first thing that does not fit; nothing has been changed.
    """
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"a state dict is a dict, got {type(state_dict).__name__}")
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise StateDictError(f"the state dict has no {key!r} (it has {sorted(map(str, state_dict))})")
    if not isinstance(state_dict["state"], Mapping):
        raise StateDictError(f"'state' of the state dict is a {type(state_dict['state']).__name__}, not a dict")
    index_of = _numbered(state_dict["param_groups"], param_groups)
    params = [param for group in param_groups for param in group["params"]]
    matched: dict[int, Mapping[str, Any]] = {}
    for saved_id, state in state_dict["state"].items():
        if saved_id not in index_of:
            raise StateDictError(f"the state dict has state for parameter {saved_id!r}, which is in no param group")
        matched[index_of[saved_id]] = _checked(index_of[saved_id], state, params[index_of[saved_id]], elementwise)
    return matched


def _numbered(saved_groups: Any, param_groups: Sequence[Mapping[str, Any]]) -> dict[Any, int]:
    """Global index by saved id: ids stand for parameters by their position."""
    if not isinstance(saved_groups, (list, tuple)):
        raise StateDictError(f"'param_groups' of the state dict is a {type(saved_groups).__name__}, not a list")
    if len(saved_groups) != len(param_groups):
        raise StateDictError(f"the state dict has {len(saved_groups)} param groups, the optimizer {len(param_groups)}")
    index_of: dict[Any, int] = {}
    params: list[Tensor] = []
    for number, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        if not isinstance(saved, Mapping):
            raise StateDictError(f"param group {number} of the state dict is a {type(saved).__name__}, not a dict")
        if "params" not in saved:
            raise StateDictError(f"param group {number} of the state dict has no 'params'")
        ids = saved["params"]
        if not isinstance(ids, (list, tuple)):
            raise StateDictError(
                f"'params' of param group {number} of the state dict is a {type(ids).__name__}, not a list"
            )
        if len(ids) != len(group["params"]):
            raise StateDictError(
                f"param group {number} has {len(ids)} parameters in the state dict and {len(group['params'])} in the "
                "optimizer"
            )
        for saved_id, param in zip(ids, group["params"], strict=True):
            if not isinstance(saved_id, Hashable):
                raise StateDictError(f"param group {number} of the state dict has {saved_id!r} for a parameter")
            if saved_id in index_of and params[index_of[saved_id]] is not param:
                raise StateDictError(f"the state dict lists parameter {saved_id!r} twice")
            index_of.setdefault(saved_id, len(params))
            params.append(param)
    return index_of


def _checked(index: int, state: Any, param: Tensor, elementwise: bool) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise StateDictError(f"the state of parameter {index} is a {type(state).__name__}, not a dict")
    for key, value in state.items():
        if not isinstance(value, Tensor) or not elementwise:
            continue
        if value.dim() and value.shape != param.shape and value.numel() != 1:
            raise StateDictError(
                f"state {key!r} of parameter {index} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}"
            )
    return state


def require_keys(
    states: Mapping[int, Mapping[str, Any]],
    param_groups: Sequence[Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    """Refuse state that lacks what ``optimizer_class`` would look up in it; a parameter without any state is new.

    Raises:
        StateDictError: names the first key that is missing.
    """
    found: dict[tuple[int, int, torch.dtype], frozenset[str]] = {}
    index = 0
    for number, (group, saved) in enumerate(zip(param_groups, saved_groups, strict=True)):
        for param in group["params"]:
            state = states.get(index)
            if state:
                kind = (number, param.dim(), param.dtype)
                if kind not in found:
                    found[kind] = _keys_after_a_step(optimizer_class, {**group, **saved}, param)
                missing = sorted(found[kind] - set(state))
                if missing:
                    raise StateDictError(
                        f"state {missing[0]!r} of parameter {index} is missing: {optimizer_class.__name__} needs "
                        f"{sorted(found[kind])}, the state dict has {sorted(map(str, state))}"
                    )
            index += 1


def _keys_after_a_step(
    optimizer_class: Callable[..., torch.optim.Optimizer], hypers: Mapping[str, Any], like: Tensor
) -> frozenset[str]:
    """What state one element with these hyperparameters gets, by torch's own classes; empty where not known.

    Classes of others are not tried out: a step of theirs might do anything.
    """
    if not optimizer_class.__module__.startswith("torch.optim."):
        return frozenset()
    probe = torch.nn.Parameter(torch.zeros([1] * like.dim(), dtype=like.dtype, device=like.device))
    probe.grad = torch.zeros_like(probe)
    try:
        optimizer = optimizer_class([{**copy.deepcopy(hypers_of(hypers)), "params": [probe]}])
        bare_step(optimizer)
    except (TypeError, RuntimeError, ValueError):  # it needs a closure, sparse gradients, or other hyperparameters
        return frozenset()
    return frozenset(optimizer.state[probe])


def cut(state: Mapping[str, Any], piece: ParamSlice, flat: FlatParam) -> dict[str, Any]:
    """The part of one parameter's full-shape state that belongs to a slice; copies, never views."""
    whole = piece.in_param.numel == flat.param.numel()
    part: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            part[key] = value
        elif whole or value.shape != flat.param.shape:
            part[key] = value.detach().clone()
        else:
            run = flat.flatten(value.detach())
            part[key] = run[piece.in_param.start : piece.in_param.stop].clone()
    return part


def copied(state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """State whose tensors share no memory with the given ones."""
    return {
        index: {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in entry.items()}
        for index, entry in state.items()
    }


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that ``str()`` gave as ``"torch.float32"`` and the like."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
