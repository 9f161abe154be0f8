"""Which connections of the user's process group have ended, where it is gloo's.

A rank that leaves training breaks its connections for that. Those of the user's group end with its process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..system.devices import HOST
from .backend_errors import ended_at_peer
from .transfers import broken_among

if TYPE_CHECKING:
    import weakref

    import torch.distributed as dist


def broken_connections(group: weakref.ref[dist.ProcessGroup]) -> Iterator[tuple[int, str]]:
    """Yield the ranks to which the group has no connection any more, and gloo's words.

    Args:
        group: the user's. Its connections are not known if it is another backend's, or connects on first use.
    """
    parent = group()  # not kept, as a group does not keep it
    if parent is None or os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0":
        return
    try:
        backend = parent._get_backend(HOST)
    except RuntimeError:  # it carries accelerator tensors alone
        return
    if type(backend).__name__ != "ProcessGroupGloo":
        return
    yield from broken_among(parent, [rank for rank in range(parent.size()) if rank != parent.rank()])


def ranks_gone(group: weakref.ref[dist.ProcessGroup]) -> list[int]:
    """Return the ranks whose processes have ended their connections of the group, as far as is known."""
    return [rank for rank, text in broken_connections(group) if ended_at_peer(text)]
