"""Compact state in a sharded state dict: places for it, and the values that what was loaded stands for.

Codes and remainders have the parameter's shape, and are cut by rows like other state. Bases have an element per block
of 64 elements in storage order, so the parameter must have that order again when they are loaded.

Of a parameter that is a DTensor each rank has blocks of its own part. Where parts are whole rows, and a row whole
blocks, these are the parameter's own blocks, and bases a DTensor with as many rows. Elsewhere state stays in torch's
form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import value_digest
from ..comm.alone_group import AloneGroup
from ..comm.groups import Group
from ..errors import StateDictError
from ..kernels.adam_state import (
    CODES,
    HALVES,
    HIGHEST_BASES,
    MOMENTS,
    STORED_KEYS,
    code_key,
    joined_master,
    require_bases,
    state_dtypes,
    unpacked,
)
from ..kernels.checks import oddity
from ..kernels.functions import ADAM
from ..kernels.runs import BASES, BLOCK_NUMEL, blocks_of
from ..kernels.strides import contiguous_strides
from ..policies import AdamState
from ..sharding.flat_param import element_order, is_dtensor
from .dtensors.local_parts import cut_like, dtensor_over, local_of, value_of_param

Sized = Mapping[str, tuple[Any, torch.Size]]
# Elements of a parameter, about, that tell whether it is the one whose other half was saved.
_DIGESTED = 1024
_CUT_APART = (
    "compact state is for elements that are not the same on this rank ({}, of a parameter or a part of shape {}); load "
    "what sharded_state_dict() returned, each tensor as it was"
)


def compact_values(made: Sized, param: Tensor, form: AdamState) -> Sized:
    """Return the state of a parameter as it is in its compact form, a value each and the shape that it grows to.

    Args:
        made: the same in torch's form.
    """
    if not {*MOMENTS} <= made.keys():
        return made
    splits = form.master == "split" and param.dtype in HALVES
    kept = {key: value for key, value in made.items() if not (key == "master" and splits)}
    dtypes = state_dtypes(form if splits else AdamState(form.moments), [role for role in ADAM.arrays if role in made])
    for role, dtype in dtypes.items():
        shape = torch.Size([blocks_of(param.numel())]) if role in BASES else param.shape
        value = torch.zeros(1, dtype=dtype, device="cpu")
        kept.pop(role, None)
        kept[code_key(role, value)] = value, shape
    return kept


def _bases_shape(param: Tensor) -> torch.Size | None:
    """Return the shape of a parameter's bases; ``None`` of a DTensor whose parts cut blocks."""
    if not is_dtensor(param):
        return torch.Size([blocks_of(param.numel())])
    by_rows = all(place.is_replicate() or place.is_shard(0) for place in param.placements)  # type: ignore[attr-defined]
    in_order = param.dim() > 1 and param.stride() == contiguous_strides(param.shape)
    row = param.shape[1:].numel()
    return torch.Size([param.shape[0], row // BLOCK_NUMEL]) if by_rows and in_order and not row % BLOCK_NUMEL else None


def stored_parts(entry: Mapping[str, Any], param: Tensor, part: Tensor) -> dict[str, Any]:
    """Return compact state of this rank's part of a parameter as state of the parameter, over the same memory."""
    if CODES[0] in entry and _bases_shape(param) is None:
        entry = plain_entry(entry, part, AloneGroup())
    return {key: _value_of_param(key, value, param, part) for key, value in entry.items()}


def _value_of_param(key: str, value: Any, param: Tensor, part: Tensor) -> Any:
    shape = _bases_shape(param) if key in BASES and is_dtensor(param) else None
    return value_of_param(value, param, part) if shape is None else dtensor_over(value.view(-1, shape[1]), param, shape)


def compact_places(made: Mapping[str, Any], param: Tensor, form: AdamState) -> Mapping[str, Any]:
    """Return places for the compact state of a DTensor, given those for the same in torch's form."""
    part = local_of(param)
    values = compact_values({key: (value, part.shape) for key, value in made.items()}, part, form)
    if CODES[0] in values and _bases_shape(param) is None:
        return made
    return {
        key: value if value is made.get(key) else _value_of_param(key, value.new_zeros(shape), param, part)
        for key, (value, shape) in values.items()
    }


def order_of(param: Tensor) -> list[int]:
    """Return the strides that say in which order a parameter's blocks are."""
    return list(element_order(param.shape, param.stride()))


def is_half(entry: Mapping[str, Any]) -> bool:
    """Return whether a parameter is half of a master, of whose other half this is the state."""
    return "remainder" in entry


def half_digest(entry: Mapping[str, Any], param: Tensor, summed: int | None) -> str | None:
    """Return a digest of a parameter that is half of a split master; ``None`` of others, and where it is not known.

    Args:
        entry: its state. summed: of a DTensor, what :meth:`Engine.sums` has of it. Of others it takes some elements.
    """
    if not is_half(entry):
        return None
    if is_dtensor(param):
        return None if summed is None else f"sum {summed}"
    return value_digest(param.detach().flatten()[:: max(param.numel() // _DIGESTED, 1)])


def _is_coded(entry: Mapping[str, Any]) -> bool:
    return not entry.keys().isdisjoint((*CODES, *BASES))


def require_once(index: int, entry: Mapping[str, Any]) -> None:
    """Raise StateDictError for an entry that has a value in both forms, whichever of them was saved."""
    twice = [key for key in MOMENTS if key in entry] if _is_coded(entry) else []
    twice += ["master"] if is_half(entry) and "master" in entry else []
    if twice:
        raise StateDictError(f"parameter {index} has state {twice[0]!r} twice: in torch's form, and in compact form")


def is_stored(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a state dict has state that is no value of torch's."""
    return not entry.keys().isdisjoint(STORED_KEYS)


def check_entry(
    index: int, entry: Mapping[str, Any], param: Tensor, order: object, half: object, summed: int | None
) -> None:
    """Raise StateDictError for a compact entry that does not fit a parameter.

    Args:
        order, half: what :func:`order_of` and :func:`half_digest` said of the parameter when the entry was saved.
        summed: as for :func:`half_digest`, of the parameter as it is now.
    """
    wanted = dict[str, tuple[torch.dtype, torch.Size]]()
    if _is_coded(entry):
        wanted |= dict.fromkeys(CODES, (torch.uint8, param.shape))
        bases = _bases_shape(param)
        if bases is None:
            raise StateDictError(
                f"compact state of parameter {index} has blocks that cuts of {param.placements} would go through; save "  # type: ignore[attr-defined]
                "it without compact=True"
            )
        wanted |= dict.fromkeys(BASES, (torch.int16, bases))
        if order != order_of(param):
            raise StateDictError(
                f"compact state of parameter {index} was saved of another order of elements in memory, strides {order} "
                f"and not {order_of(param)}; save it without compact=True"
            )
    if is_half(entry):
        wanted["remainder"] = torch.int16, param.shape
        if param.dtype is not torch.bfloat16:
            raise StateDictError(
                f"state 'remainder' of parameter {index} is half of a split master, whose other half is a parameter in "
                f"torch.bfloat16, not in {param.dtype}; save it without compact=True"
            )
        if half is not None and half_digest(entry, param, summed) not in (None, half):
            raise StateDictError(
                f"state 'remainder' of parameter {index} is half of a split master, whose other half is the parameter "
                "as it was saved, and it has other values: load the model first, or save without compact=True"
            )
    for key, (dtype, shape) in wanted.items():
        value = entry.get(key)
        if not (isinstance(value, Tensor) and value.dtype is dtype and value.shape == shape):
            given = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise StateDictError(
                f"state {key!r} of parameter {index} must be {dtype} of shape {tuple(shape)}, and is {given}"
            )
        _check_elements(f"state {key!r} of parameter {index}", local_of(value), HIGHEST_BASES.get(key))


def _check_elements(what: str, part: Tensor, highest: int | None) -> None:
    """Raise StateDictError unless a tensor's part here has elements, from 0 to the ``highest`` if there is such."""
    odd = oddity(part)
    if odd is not None:
        raise StateDictError(f"{what} is {odd}, not a dense tensor with values")
    if highest is not None:
        require_bases(what, part, highest)


def plain_entry(entry: Mapping[str, Any], param: Tensor, group: Group) -> dict[str, Any]:
    """Return a checked compact entry in torch's form, cut as it is, or as its DTensor is. Collective.

    Raises:
        StateDictError: its tensors are cut in different ways; after all of this entry that is collective.
    """
    if is_dtensor(param):
        part = local_of(param)
        parts = {key: _local_value(key, value, param) for key, value in entry.items()}
        return {key: value_of_param(value, param, part) for key, value in plain_entry(parts, part, group).items()}
    from ..state.row_sharded import Rows, full_of  # take seconds to import, and few need them

    plain = {key: value for key, value in entry.items() if key not in STORED_KEYS}
    order = element_order(param.shape, param.stride())  # of blocks; a file may have the codes in another
    low = Rows.of(entry["remainder"], order, group) if "remainder" in entry else None
    if CODES[0] in entry:
        codes = [Rows.of(entry[key], order, group) for key in CODES]
        bases = [full_of(entry[key]).cpu() for key in BASES]
        span = codes[0].span
        blocks = slice(span.start // BLOCK_NUMEL, max(blocks_of(span.stop), span.start // BLOCK_NUMEL))
        lead = span.start % BLOCK_NUMEL if span.numel else 0
        if codes[1].span != span or min(base.numel() for base in bases) < blocks.stop:
            raise StateDictError(_CUT_APART.format(", ".join((*CODES, *BASES)), tuple(param.shape)))
        runs = [run.run for run in codes]
        moments = unpacked(runs, [base[blocks] for base in bases], lead) if span.numel else [r.float() for r in runs]
        plain.update(zip(MOMENTS, (codes[0].with_values(run, group) for run in moments), strict=True))
    if low is not None:
        high = Rows.whole(param, order).run[low.span.start : low.span.stop]
        if high.numel() != low.span.numel:
            raise StateDictError(_CUT_APART.format("remainder", tuple(param.shape)))
        plain["master"] = low.with_values(joined_master(high, low.run), group)
    return plain


def _local_value(key: str, value: Any, param: Tensor) -> Any:
    """Return this rank's part of a value of a DTensor's compact entry; of bases, 1-D."""
    like, shape = param, _bases_shape(param) if key in BASES else None
    if shape is not None:
        like = dtensor_over(local_of(param).new_empty(local_of(param).shape[0], shape[1]), param, shape)
    if not isinstance(value, Tensor) or value.dtype is not torch.int16:
        return local_of(cut_like(value, like))
    part = local_of(cut_like(value.int(), like)).to(torch.int16)  # gloo sends no int16
    return part if shape is None else part.reshape(-1)
