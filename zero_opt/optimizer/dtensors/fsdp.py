"""What FSDP2 does with parameters meanwhile: whether the model holds gathered copies of them.

A step changes the shards. Copies that a forward has gathered, and that no backward or ``reshard()`` has dropped since,
would stay as they were, and the next forward would use them. torch says nothing of that.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ...errors import ParamsUnsharded

_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"
_COPIES = ("_unsharded_param", "_sharded_post_forward_param")


def _fsdp_params() -> Iterator[tuple[Any, Any]]:
    """torch's record of every parameter that ``fully_shard`` has sharded in this process, and of its param group."""
    states = sys.modules.get(_STATES)
    if states is None:
        return
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        state: Any = reference()
        if isinstance(state, states.FSDPState):
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from () if group is None else ((record, group) for record in group.fsdp_params)


def _name(record: Any) -> str:
    fqn = getattr(record, "_param_fqn", None) or record._module_info.param_name
    return f"parameter {fqn!r} of shape {tuple(record.sharded_param.shape)}"


class Shards:
    """The parameters of one optimizer, as far as ``fully_shard`` made them."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []

    def add(self, params: Sequence[Tensor]) -> None:
        """Watch more parameters.

        Raises:
            ParamsUnsharded: one is a gathered copy.
        """
        given = {id(param) for param in params}
        for record, group in _fsdp_params():
            if any(id(getattr(record, name, None)) in given for name in _COPIES):
                raise ParamsUnsharded(
                    f"{_name(record)} is unsharded, and a copy that a forward has gathered was given in its place; "
                    "call model.reshard(), on every FSDP module, before model.parameters()"
                )
            if id(record.sharded_param) in given:
                self._known.append((weakref.ref(record), weakref.ref(group)))

    def require_sharded(self) -> None:
        """Raise ParamsUnsharded if the model holds a gathered copy of a parameter, or one is on its way."""
        for record, group in ((record(), group()) for record, group in self._known):
            if record is None:
                continue
            if getattr(group, "_all_gather_result", None) is not None:
                raise ParamsUnsharded(
                    f"{_name(record)} is being unsharded, and a step would leave the gathered copy as it was "
                    "for the next forward; step() before unshard(async_op=True), or wait for it and call "
                    "model.reshard(), on every FSDP module"
                )
            if record.sharded_state.name != "SHARDED":
                raise ParamsUnsharded(
                    f"{_name(record)} is unsharded: a forward has gathered a copy of it, which no backward has dropped "
                    "and a step would leave as it was for the next forward; call model.reshard(), on every FSDP "
                    "module, before step(), and let the last backward before it reshard "
                    "(set_reshard_after_backward(True))"
                )
