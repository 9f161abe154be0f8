"""Uneven inputs (torch's ``Join``): ranks that have run out of inputs take part in the others' steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook

from ..comm.groups import Group
from ..comm.rendezvous import resolve_group
from ..errors import ParamsReplaced
from ..field_checks import plain_number
from ..sharding.param_groups import hypers_of, param_name
from ..system.devices import HOST, carries
from .interface import Engine
from .offload_state import Parked
from .one_call import OneCall, one_call


class ShadowSteps(JoinHook):
    """The hook of a rank without inputs: it takes part in every step of the ranks that still have some."""

    def __init__(self, optimizer: UnevenInputs) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take part in a step of the others."""
        self._optimizer._shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: ARG002  (torch's)
        """End: all ranks have run out of inputs."""
        self._optimizer._engine.forget_epoch()


def ends_join(error: RuntimeError) -> bool:
    """Return whether ``Join(throw_on_early_termination=True)`` raises this on all ranks, as one has no inputs left."""
    return "exhausted inputs" in str(error)


def follow_hypers(group: Group, param_groups: Sequence[MutableMapping[str, Any]], absentees: Sequence[int]) -> None:
    """Give ranks that have run out of inputs, whose schedulers stand still, the others' hyperparameters. Collective.

    Numbers, strings, tensors of one element and tuples of those; anything else stays as it is.
    """
    source = next(rank for rank in range(group.world_size) if rank not in absentees)
    listed = [_as_json(hypers_of(entry)) for entry in param_groups] if group.rank == source else []
    received = json.loads(group.all_gather_bytes(json.dumps(listed).encode())[source])
    if group.rank in absentees:
        for entry, values in zip(param_groups, received, strict=True):
            for key, value in values.items():
                _set(entry, key, value)


def _as_json(hypers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that JSON can hold."""
    listed = {}
    for key, value in hypers.items():
        items = [
            item.item() if isinstance(item, Tensor) and item.numel() == 1 else plain_number(item)
            for item in (value if isinstance(value, (tuple, list)) else [value])
        ]
        if all(item is None or isinstance(item, (bool, int, float, str)) for item in items):
            listed[key] = items if isinstance(value, (tuple, list)) else items[0]
    return listed


def _set(entry: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set one hyperparameter, a tensor in place."""
    mine = entry.get(key)
    if isinstance(mine, Tensor):
        mine.fill_(value)
    elif isinstance(mine, (tuple, list)):
        entry[key] = type(mine)(
            old.detach().clone().fill_(new) if isinstance(old, Tensor) else new
            for old, new in zip(mine, value, strict=True)
        )
    else:
        entry[key] = value


class UnevenInputs(torch.optim.Optimizer, Joinable):
    """The optimizer that users see, as engines know it, with what ``torch.distributed.algorithms.Join`` uses of it."""

    _engine: Engine
    _one_call: OneCall
    _parked: Parked

    def _describe(self, index: int) -> str:
        """Return the name that messages give the parameter with a global index."""
        return param_name(self.param_groups, index)

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002  (for other joinables)
        """Return what ``torch.distributed.algorithms.Join`` has a rank do that has run out of inputs.

        That rank takes part in the others' steps with gradients of zero, so the mean is still over all ranks, and with
        the others' hyperparameters. DDP, if used, comes before the optimizer: ``Join([ddp, opt])``.
        """
        return ShadowSteps(self)

    @one_call("a step under Join", replans=True)
    def _shadow_step(self) -> None:
        self._engine.shadow_step()

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` puts its own tensors: the parameters' device, unless the group carries none of its tensors.

        DistributedDataParallel has that of its parameters too, and ``Join`` requires one device of all that join.

        Raises:
            ParamsReplaced: ``param_groups`` has been broken.
        """
        group = self.join_process_group
        try:
            device, *_ = (param.device for entry in self.param_groups for param in entry["params"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ParamsReplaced("opt.param_groups has no parameters any more; put back what was there") from error
        return device if group is None or carries(str(dist.get_backend_config(group)), device) else HOST

    @property
    def join_process_group(self) -> Any:
        return self._engine.group.parent or resolve_group(None)
