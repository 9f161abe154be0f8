"""Param groups as users write and hold them, and as they were planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, ConfigTypeError, ParamsReplaced
from ..system.unedited_hypers import OUTER_KEYS
from .flat_param import is_dtensor

_WAY_OUT = (
    "construct the optimizer after prepare(), fully_shard() and whatever else replaces parameters, and add parameters "
    "with opt.add_param_group(), on every rank"
)
# Where the groups hold planned parameters alone, but not as they were planned.
_PUT_BACK = (
    "the groups must keep the parameters that they were made with: put those back, in their order; or, on every rank, "
    "construct a new optimizer with the groups you want, and load a state dict with the same groups. To stop training "
    "a parameter, leave it in its group and call requires_grad_(False)"
)


@dataclass(frozen=True)
class Replacement:
    """A difference between the param groups and what was planned.

    Attributes:
        text: says what the groups hold and what was planned.
        fits: whether every group has as many parameters as were planned, of the same shapes, so that all can be planned
            again.
    """

    text: str
    fits: bool = False


class PlannedGroups:
    """The planned parameters of every param group of ``owner``, which users see. No method is collective."""

    def __init__(self, owner: torch.optim.Optimizer) -> None:
        self._owner = owner
        self._planned: list[list[Tensor]] = []

    def add(self) -> None:
        """Remember the parameters of the owner's new groups."""
        self._planned += [list(group["params"]) for group in self._owner.param_groups[len(self._planned) :]]

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over all parameters, by global index."""
        return (param for planned in self._planned for param in planned)

    def replacement(self) -> Replacement | None:
        """Return how the groups differ from what was planned, ``None`` if they hold the planned parameters.

        Takes 14 ns per parameter. Equality of lists would ask tensors whether they are equal.
        """
        groups = self._owner.param_groups
        if (wrong := _misshapen(groups)) is not None:
            return Replacement(wrong)
        if len(groups) != len(self._planned):
            return Replacement(f"opt.param_groups has {len(groups)} groups, but {len(self._planned)} were planned")
        replacements = [
            _replacement(f'"params" of param group {number}', group.get("params"), planned)
            for number, (group, planned) in enumerate(zip(groups, self._planned, strict=True))
        ]
        return min(filter(None, replacements), key=lambda replacement: replacement.fits, default=None)

    def require_groups(self) -> None:
        """Raise ParamsReplaced unless there are groups, whatever they hold."""
        if (wrong := _misshapen(self._owner.param_groups)) is not None:
            raise ParamsReplaced(f"{wrong}; {_PUT_BACK}")

    def require(self) -> None:
        """Raise ParamsReplaced unless the groups hold the planned parameters."""
        replacement = self.replacement()
        if replacement is not None:
            raise ParamsReplaced(f"{replacement.text}; {self._way_out()}")

    def require_replaceable(self, *, begun: bool) -> None:
        """Raise ParamsReplaced if the optimizer cannot plan the groups' parameters instead of the planned ones.

        Args:
            begun: the planned parameters have been used: stepped, loaded, or reduced gradients of.
        """
        replacement = self.replacement()
        if replacement is not None and (begun or not replacement.fits):
            late = ", which has been stepped, or had gradients reduced or state loaded" if replacement.fits else ""
            raise ParamsReplaced(f"{replacement.text}{late}; {self._way_out()}")

    def _way_out(self) -> str:
        """Return what to do about groups that hold something else than was planned."""
        groups = self._owner.param_groups
        planned, held = {id(param) for param in self}, list[Any]()
        for group in () if _misshapen(groups) else groups:
            params = group.get("params", ())
            held += params if isinstance(params, (list, tuple)) else [params]
        return _PUT_BACK if all(id(param) in planned for param in held) else _WAY_OUT

    def require_replaced(self) -> None:
        """Raise ParamsReplaced if the groups hold the planned parameters, while another rank's do not."""
        if self.replacement() is None:
            raise ParamsReplaced(
                f"opt.param_groups holds the planned parameters here, but others on another rank; {_WAY_OUT}"
            )


def _misshapen(groups: Any) -> str | None:
    """Return what keeps an attribute ``param_groups``, which users may set to anything, from being param groups."""
    if not isinstance(groups, (list, tuple)):
        return f"opt.param_groups is of type {type(groups).__name__}, not a list"
    for number, group in enumerate(groups):
        if not isinstance(group, MutableMapping):
            return f"param group {number} is of type {type(group).__name__}, not a dict"
    return None


def _replacement(label: str, params: Any, planned: Sequence[Tensor]) -> Replacement | None:
    if not isinstance(params, (list, tuple)):
        return Replacement(f"{label} is of type {torch.typename(params)}, not a list")
    if len(params) != len(planned):
        return Replacement(f"{label} has {len(params)} parameters, but {len(planned)} were planned")
    if all(map(is_, params, planned)):
        return None
    pairs = zip(params, planned, strict=True)
    others = [(position, *pair, _fits(*pair)) for position, pair in enumerate(pairs) if pair[0] is not pair[1]]
    position, param, before, fits = min(others, key=lambda other: other[-1])
    held = f"another {_named(param)}" if isinstance(param, Tensor) else f"a {torch.typename(param)}"
    return Replacement(f"position {position} of {label} holds {held} in place of the planned {_named(before)}", fits)


def _fits(param: object, before: Tensor) -> bool:
    """Return whether ``param`` can replace a planned parameter; only a DTensor can replace a DTensor."""
    alike = isinstance(param, Tensor) and param.shape == before.shape
    return alike and (is_dtensor(param) or not is_dtensor(before))


def _named(param: Tensor) -> str:
    kind = "DTensor" if is_dtensor(param) else "tensor"
    return f"{kind} of shape {tuple(param.shape)}"


def run_once(params: Iterable[Any]) -> Iterable[Any]:
    """Return what :func:`normalized` makes of ``params``. If it raises, iterating over the result raises its error."""
    try:
        return normalized(params)
    except Exception as error:  # whatever a generator of the user's raises
        return _failed(error)


def _failed(error: Exception) -> Iterator[Any]:
    yield from ()
    raise error


def params_of(entries: Iterable[Any]) -> list[Tensor]:
    """Return the parameters in what :func:`run_once` returns, in their order; none if iterating over that raises."""
    tensors: list[Tensor] = []
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping):
            params = entry["params"]
            tensors += [params] if isinstance(params, Tensor) else params_of(params)
        else:
            tensors.append(entry[1] if isinstance(entry, tuple) else entry)
    return tensors


def normalized(params: Iterable[Any]) -> list[Any]:
    """Return ``params`` with every iterator run once, so that the result can be read several times.

    Raises:
        ConfigError, ConfigTypeError: an optimizer does not take ``params``; names the group and the position in it.
    """
    entries = _listed(params, "params", "tensors or dicts")
    if not entries:
        raise ConfigError("optimizer got an empty parameter list")
    if isinstance(entries[0], Mapping):
        return [normalized_group(entry, number) for number, entry in enumerate(entries)]
    _check_tensors(entries, 0)
    return entries


def normalized_group(group: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return one param group, as :func:`normalized` makes it."""
    if not isinstance(group, Mapping):
        raise ConfigTypeError(f"param group {number} must be a dict, got {torch.typename(group)}")
    if "params" not in group:
        raise ConfigError(f"param group {number} has no 'params'; it has {sorted(map(str, group))}")
    if isinstance(group["params"], Tensor):
        return dict(group)
    params = _listed(group["params"], f"params of group {number}", "tensors")
    _check_tensors(params, number)
    return {**group, "params": params}


def _listed(params: Iterable[Any], name: str, of: str) -> list[Any]:
    if isinstance(params, (set, frozenset)):
        raise ConfigTypeError(
            f"{name} are a {torch.typename(params)}, which has no order, so that ranks, and saved state, would take "
            "one parameter for another; use a list"
        )
    if isinstance(params, Tensor):  # torch's words
        raise ConfigTypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, but got "
            + torch.typename(params)
        )
    wrong = f"{name} must be an iterable of {of}, got {torch.typename(params)}{_instead_of(params)}"
    try:
        iterator = iter(params)
    except TypeError as error:
        raise ConfigTypeError(wrong) from error
    entries = list(iterator)
    if isinstance(params, (torch.nn.Module, Mapping)) and any(isinstance(e, (torch.nn.Module, str)) for e in entries):
        raise ConfigTypeError(wrong)
    return entries


def _instead_of(params: object) -> str:
    """Return what a message advises to pass instead of an argument without parameters; "" if that is unclear."""
    if isinstance(params, torch.nn.Module):
        return "; pass its parameters()"
    if isinstance(params, Mapping):
        return ", which would give its keys; pass model.parameters() or model.named_parameters()"
    if isinstance(params, torch.optim.Optimizer) or (
        isinstance(params, type) and issubclass(params, torch.optim.Optimizer)
    ):
        return "; parameters come first: ShardedOptimizer(params, optimizer_class, lr=...)"
    return "; write model.parameters(), with parentheses" if callable(params) else ""


def _check_tensors(params: Sequence[Any], number: int) -> None:
    for position, entry in enumerate(params):
        param = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if not isinstance(param, Tensor):
            raise ConfigTypeError(
                f"group {number}, position {position} must be a tensor or a (name, tensor) pair, got "
                f"{torch.typename(param)}{_instead_of(param)}"
            )


def param_name(param_groups: Sequence[Mapping[str, Any]], index: int) -> str:
    """Return how messages name the parameter with a global index, by its number alone where there are no groups."""
    start = 0
    for number, group in enumerate(() if _misshapen(param_groups) else param_groups):
        count = len(group["params"]) if isinstance(group.get("params"), Sized) else 0
        if index < start + count:
            names, at = group.get("param_names"), index - start
            name = f" ({names[at]})" if isinstance(names, (list, tuple)) and at < len(names) else ""
            return f"parameter {index}{name} (group {number}, position {at})"
        start += count
    return f"parameter {index}"


def hypers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a param group."""
    return {key: value for key, value in group.items() if key not in OUTER_KEYS}


def set_hypers(group: MutableMapping[str, Any], hypers: Mapping[str, Any]) -> None:
    """Give a param group these hyperparameters in place of those that it has."""
    for gone in hypers_of(group).keys() - hypers.keys():
        del group[gone]
    group.update(hypers)
