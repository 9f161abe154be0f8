"""Equal parameters on all ranks, to start from."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ..comm.groups import broadcast, carries_messages, check_rank
from ..comm.rendezvous import resolve_group
from ..comm.short_lived import short_lived_group
from ..errors import ConfigTypeError
from .background_gather import finish_gathers


def broadcast_params(model: torch.nn.Module, src: int = 0, process_group: Any = None) -> None:
    """Overwrite every parameter and buffer of ``model`` with rank ``src``'s, on every rank.

    All ranks of the group must call it. ``src`` is a rank of the group. Ranks that are lost, stopped or silent are
    noticed as in a step. After an error parameters are partly overwritten, and the group can be used as before.

    Raises:
        ConfigTypeError, ConfigError: ``model`` is no module, ``src`` not a rank. PeerLost, PeerSilent: a rank has left,
            or does not come in time. Others as for ``ShardedOptimizer``.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigTypeError(f"broadcast_params() takes a module, got a {type(model).__name__}; pass the model itself")
    pg = resolve_group(process_group)
    world_size = 1 if pg is None else pg.size()
    check_rank(src, world_size, "src")
    finish_gathers(list(model.parameters()))
    if pg is None or world_size == 1:
        return
    own = short_lived_group(pg, "broadcast_params()") if carries_messages(pg) else nullcontext()
    with torch.no_grad(), own as group:
        for tensor in [*model.parameters(), *model.buffers()]:
            staging = tensor.detach().resolve_conj().resolve_neg().contiguous()
            raw = staging.view(-1).view(torch.uint8)  # backends do not know every dtype
            if group is not None and raw.is_cpu:
                group.broadcast(raw, src)
            else:
                broadcast(pg, raw, src).wait()
            with torch.inference_mode() if tensor.is_inference() else nullcontext():
                tensor.copy_(staging)
