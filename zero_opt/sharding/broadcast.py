"""Equal parameters on all ranks, to start from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.beginning import Beginning
from ..comm.groups import broadcast, carries_messages, checked_rank
from ..comm.rendezvous import resolve_group
from ..comm.short_lived import short_lived_group
from ..errors import ConfigTypeError, UnsupportedParam
from ..kernels.checks import oddity
from ..kernels.strides import resolved, run_of
from .background_gather import finish_gathers
from .flat_param import check_memory, is_dtensor


def broadcast_params(model: torch.nn.Module, src: int = 0, process_group: Any = None) -> None:
    """Overwrite every parameter and buffer of ``model`` with rank ``src``'s, on every rank.

    All ranks of the group must call it. Ranks that are lost, stopped or silent are
    noticed as in a step. The group can be used as before after an error, which leaves parameters partly overwritten
    if a rank is lost, and as they were otherwise.

    Args:
        model: of the same structure on every rank.
        src: the rank of the group whose values all get.
        process_group: a ProcessGroup or a DeviceMesh, as for ``ShardedOptimizer``; default is the default group. A rank
            alone, and one without a group, keeps what it has.

    Returns:
        None.

    Raises:
        ConfigTypeError, ConfigError: ``model`` is no module, or ``src`` not a rank. RankMismatch: ``src`` differs
            between ranks, or models do in names, their order, shapes, dtypes or kinds of device. UnsupportedParam: a
            tensor has no elements of its own to overwrite (a DTensor, a sparse, quantized, expanded or lazy one). All
            of these on every rank, if the ranks are processes. PeerLost, PeerSilent: a rank has left, or does not come
            in time. ProcessGroupError: several ranks were started and there is no process group, or ranks cannot
            connect. OutOfResources: no file descriptors are left.
    """
    with Beginning(process_group, "broadcast_params()"):
        _broadcast(model, src, process_group)


def _broadcast(model: torch.nn.Module, src: int, process_group: Any) -> None:
    """Do what :func:`broadcast_params` does."""
    pg = resolve_group(process_group)
    if pg is None or pg.size() == 1:
        _source_and_tensors(model, src, 1)
        return
    own = short_lived_group(pg, "broadcast_params()") if carries_messages(pg) else nullcontext()
    with torch.no_grad(), own as group:
        if group is None:
            src, named = _source_and_tensors(model, src, pg.size())
        else:
            agreement = Agreement(group, str)
            with agreement.together("broadcast_params()"):
                src, named = _source_and_tensors(model, src, pg.size())
            agreement.require_same_contents(_contents(src, named))
        for _, tensor in named:
            staging = resolved(tensor.detach()).contiguous()
            raw = run_of(staging).view(torch.uint8)  # backends do not know every dtype
            if group is not None and raw.is_cpu:
                group.broadcast(raw, src)
            else:
                broadcast(pg, raw, src).wait()
            with torch.inference_mode() if tensor.is_inference() else nullcontext():
                tensor.copy_(staging)


def _source_and_tensors(model: object, src: object, world_size: int) -> tuple[int, list[tuple[str, Tensor]]]:
    """Return the source, and the model's parameters and buffers with their names, once parameters have arrived."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigTypeError(f"broadcast_params() takes a module, got a {type(model).__name__}; pass the model itself")
    source = checked_rank(src, world_size, "src")
    finish_gathers(list(model.parameters()))
    named: list[tuple[str, Tensor]] = [(f"parameter {name}", param) for name, param in model.named_parameters()]
    return source, [*named, *((f"buffer {name}", buffer) for name, buffer in model.named_buffers())]


def _contents(src: int, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Any]]:
    """Yield what must be the same on all ranks; raise UnsupportedParam for a tensor that cannot be sent."""
    yield "src", src
    for name, tensor in named:
        if is_dtensor(tensor):
            raise UnsupportedParam(
                f"{name} is a DTensor, of which each rank has a part; call broadcast_params() before fully_shard()"
            )
        odd = oddity(tensor)
        if odd is not None:
            raise UnsupportedParam(f"{name} is {odd}; broadcast_params() sends dense tensors with values")
        check_memory(tensor, name)
        yield name, f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device.type}"
