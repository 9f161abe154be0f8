"""What ranks compare: param groups when they are made, hyperparameters at every step, and what is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import value_digest
from ..comm.groups import tensor_bytes
from ..field_checks import plain_number, plain_numbers
from ..kernels.strides import is_dense, joined_bytes
from ..sharding.flat_param import check_memory, is_wrapper
from ..sharding.param_groups import hypers_of
from ..state.usual_states import UsualStates, values_by_name
from ..system.unedited_hypers import UneditedHypers

# Tensors of at most so many bytes are hashed together, so many at a time.
_SMALL_BYTES, _SMALL_AT_ONCE = 1 << 14, 1 << 10


def _comparable(value: Any) -> Any:
    """Return ``value`` as plain Python if ranks can compare that, else its type."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    value = plain_numbers(value)
    if isinstance(value, (tuple, list)):
        return tuple(_comparable(item) for item in value)
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return tuple((repr(key), _comparable(item)) for key, item in sorted(value.items(), key=by_name))
    value = plain_number(value)
    return value if value is None or isinstance(value, (bool, int, float, complex, str)) else type(value)


def by_name(item: tuple[Any, Any]) -> str:
    """Return what items are sorted by, whose keys may be of any type."""
    return repr(item[0])


def hyper_contents(groups: Sequence[Mapping[str, Any]], first: int = 0) -> Iterator[tuple[str, Any]]:
    """Return all hyperparameters of groups, numbered from ``first``, as (name, JSON value)."""
    for number, group in enumerate(groups, first):
        yield f"hyperparameters of group {number}", sorted(map(str, hypers_of(group)))
        for key, value in sorted(hypers_of(group).items(), key=by_name):
            yield f"hyperparameter {key} of group {number}", repr(_comparable(value))


class HyperDigest:
    """A 64-bit digest of hyperparameters, and of the parameters whose state the user has dropped.

    Tensors outside host memory are left out: it would have to wait for them.
    """

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._digest = 0
        self._unedited = UneditedHypers()

    def of(self, groups: Sequence[Mapping[str, Any]], dropped: Collection[int]) -> int:
        """Return the digest, which is the same on every rank and in every process if the values are."""
        if not dropped and self._unedited.are(groups):
            return self._digest
        values = [
            (number, key, _comparable(value))
            for number, group in enumerate(groups)
            for key, value in hypers_of(group).items()
            if not (isinstance(value, Tensor) and not value.is_cpu)
        ]
        values += [(index, "dropped", None) for index in dropped]
        if values != self._known:  # NaN is never known
            text = repr(sorted(values, key=str)).encode()
            self._known, self._digest = values, int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        self._unedited.note(() if dropped else groups)
        return self._digest


def loaded_digest(states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a digest, equal on two ranks only where :func:`loaded_contents` is; sooner computed for small tensors."""
    told = hashlib.sha256(repr([*hyper_contents(groups)]).encode())
    if isinstance(states, UsualStates):
        _tell_usual(told, states)
        return told.digest()
    kinds: dict[tuple[str, torch.dtype, torch.Size], int] = {}  # in order of appearance
    texts: list[Any] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for index, state in sorted(states.items()):
        texts.append(index)
        for key, value in state.items():
            name = repr(key)  # 1, True and "1" are different keys
            if type(value) is Tensor and value.is_cpu and value.nbytes <= _SMALL_BYTES:
                texts.append(kinds.setdefault((name, value.dtype, value.shape), len(kinds)))
                small.setdefault(value.dtype, []).append(value if value.dim() == 1 else value.reshape(-1))
            elif isinstance(value, Tensor):
                values = getattr(value, "placements", None) or value_digest(value)
                texts.append(f"{name} {value.dtype} {tuple(value.shape)} {values}")
            else:
                texts.append(f"{name} {_comparable(value)!r}")
    told.update(repr((texts, [*kinds])).encode())
    with torch.no_grad():
        for values in small.values():
            for start in range(0, len(values), _SMALL_AT_ONCE):
                told.update(tensor_bytes(torch.cat(values[start : start + _SMALL_AT_ONCE])))
    return told.digest()


def _tell_usual(told: hashlib._Hash, states: UsualStates) -> None:
    """Add to a digest what tells usual states apart.

    Their shapes are those of parameters, which are the same on all ranks, or of scalars.
    """
    columns = values_by_name(states.values())
    forms = [(repr(name), column[0].dtype, column[0].dim() > 0) for name, column in columns.items()]
    told.update(repr(([*states], forms)).encode())
    for column in columns.values():
        small = [value.nbytes <= _SMALL_BYTES for value in column]
        told.update(repr([value_digest(value) for value in compress(column, map(not_, small))]).encode())
        values = [*compress(column, small)]
        for start in range(0, len(values), _SMALL_AT_ONCE):
            told.update(joined_bytes(values[start : start + _SMALL_AT_ONCE]))


def loaded_contents(
    states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], describe: Callable[[int], str]
) -> Iterator[tuple[str, Any]]:
    """Return what every rank must load alike, as (name, JSON value); for tensors cut over the ranks, not the values."""
    yield from hyper_contents(groups)
    for index, state in sorted(states.items()):
        yield f"state of {describe(index)}", sorted(map(str, state))
        for key, value in sorted(state.items(), key=by_name):
            if isinstance(value, Tensor):
                values = getattr(value, "placements", None) or f"digest {value_digest(value)}"
                told = f"{value.dtype} {tuple(value.shape)}, {values}"
            else:
                told = repr(_comparable(value))
            yield f"state {key!r} of {describe(index)}", told


def contents(
    groups: Sequence[Mapping[str, Any]], first_group: int, describe: Callable[[int], str], *, values: bool
) -> Iterator[tuple[str, Any]]:
    """Return what every rank must hold alike, as (name, JSON value), from group ``first_group`` on.

    Args:
        values: include a digest of every parameter's values.
    """
    index = sum(len(group["params"]) for group in groups[:first_group])
    for number, group in enumerate(groups[first_group:], first_group):
        yield from hyper_contents([group], number)
        yield f"number of parameters in group {number}", len(group["params"])
        names = group.get("param_names")  # before labels, which have them
        given = "as named_parameters() gives" if names else "none, as parameters() gives"
        yield f"names of parameters in group {number}", given
        for position, param in enumerate(group["params"]):
            if names:
                yield f"name of parameter {index}", str(names[position])
            label = describe(index)
            yield f"{label} shape", list(param.shape)
            yield f"{label} strides", list(param.stride()) if is_dense(param.shape, param.stride()) else "not dense"
            yield f"{label} dtype", str(param.dtype)
            yield f"{label} device type", param.device.type
            yield f"{label} requires_grad", param.requires_grad
            wraps = is_wrapper(param)
            yield f"{label} has memory of its own", not wraps
            if values and not wraps:
                yield f"{label} values", value_digest(param)
            index += 1


def value_contents(params: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Any]]:
    """Return a digest of each labeled parameter's values.

    Raises:
        UnsupportedParam: one has no memory of its own.
    """
    for label, param in params:
        check_memory(param, label)
        yield f"{label} values", value_digest(param)
