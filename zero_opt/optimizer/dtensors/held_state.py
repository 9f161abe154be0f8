"""Whether the ranks of a mesh say the same, and hold state of the same form, before any of it travels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor

from ...errors import RankMismatch, StateDictError
from ..contents import by_name
from .mesh_group import MeshGroup


def difference(
    group: MeshGroup, states: Mapping[int, Mapping[str, Any]], params: Sequence[int], call: str
) -> StateDictError | None:
    """Return the error about the first parameter whose state has another form on another rank. Collective.

    Args:
        states: this rank's, by global index. params: the parameters on the mesh of ``group``, by global index.
    """
    payload = json.dumps([_form(states.get(index, {})) for index in params]).encode()
    if len({*group.all_gather_bytes(hashlib.sha256(payload).digest(), call)}) == 1:
        return None
    by_rank = map(json.loads, group.all_gather_bytes(payload, call))
    for at, forms in enumerate(zip_longest(*by_rank, fillvalue="no such parameter")):
        other = next((rank for rank, form in enumerate(forms) if form != forms[0]), 0)
        if other:
            return StateDictError(
                f"the state of parameter {params[at] if at < len(params) else at} is not the same on all ranks of its "
                f"mesh: {forms[0]} on rank {group.ranks[0]}, {forms[other]} on rank {group.ranks[other]}. Give "
                "opt.state[p] the same keys on every rank, drop the whole entry on all of them, or load a checkpoint"
            )
    return None


def require_equal(name: str, by_rank: Mapping[int, object]) -> None:
    """Raise RankMismatch unless all ranks have said the same; those of several meshes are numbered alike."""
    first, wanted = next(iter(by_rank.items()), (0, None))
    for rank, value in by_rank.items():
        if value != wanted:
            raise RankMismatch(f"{name}: {wanted} on rank {first}, {value} on rank {rank}; say the same on every rank")


def _form(state: Mapping[Any, Any]) -> str:
    """Return a text, for a message, of what of a parameter's state must be the same on every rank."""
    return ", ".join(f"{key!r} ({_kind(value)})" for key, value in sorted(state.items(), key=by_name)) or "none"


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    cut = getattr(value, "placements", None)
    return f"{value.dtype} of shape {tuple(value.shape)}" + (f", {cut}" if cut is not None else "")
