"""Backends that carry accelerator tensors, made for process groups of our own.

:func:`torch.distributed.new_group` cannot be used, as ``Group._new_group`` explains. So a backend is made here as
torch makes it: NCCL and XCCL by their classes, any other by the function that it was registered with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..errors import ProcessGroupError
from ..system.devices import HOST, device_backends
from .store import c10d

_KINDS = c10d.ProcessGroup.BackendType


def group_timeout_s(parent: dist.ProcessGroup) -> float:
    """Seconds that a collective of the parent may take; torch's default where its backend does not say."""
    for device in (HOST.type, *device_backends(str(dist.get_backend_config(parent)))):
        with contextlib.suppress(RuntimeError, AttributeError):  # no such backend; it has no options
            options: Any = parent._get_backend(torch.device(device)).options
            return float(options._timeout.total_seconds())
    return default_pg_timeout.total_seconds()


def add_device_backend(pg: Any, device_type: str, backend: str, timeout: timedelta, ranks: list[int]) -> None:
    """Let a process group carry tensors of an accelerator by the named backend.

    Args:
        pg: a ``ProcessGroup`` with its name set. ranks: its members' global ranks.

    Raises:
        ProcessGroupError: the backend is neither built into torch nor registered.
    """
    store = c10d.PrefixStore(device_type, pg.get_group_store())
    kind, made = _backend_of(backend, store, pg, timeout, ranks)
    pg._register_backend(torch.device(device_type), kind, made)


class Stages(NamedTuple):
    """Two process groups of this rank, in which accelerator tensors go through one after the other.

    Attributes:
        inside: the ranks of this host. between: the ranks in this rank's place, one of each host.
    """

    inside: Any
    between: Any


def build_stages(pg: Any, backends: Mapping[str, str], hosts: int, timeout: timedelta, ranks: Sequence[int]) -> Stages:
    """Return the groups of so many hosts, which have as many ranks of a process group each, one host after another.

    Args:
        backends: by device type. ranks: global, of the members of ``pg``.
    """
    per_host = len(ranks) // hosts
    host, place = divmod(pg.rank(), per_host)
    stages = Stages(
        _part_of(pg, f"inside/{host}", place, per_host),
        _part_of(pg, f"between/{place}", host, hosts),
    )
    members = ranks[host * per_host : (host + 1) * per_host], ranks[place::per_host]
    for part, of_part in zip(stages, members, strict=True):
        for device_type, backend in backends.items():
            add_device_backend(part, device_type, backend, timeout, list(of_part))
    return stages


def _part_of(pg: Any, name: str, rank: int, size: int) -> Any:
    """Return a process group without a backend, of some ranks of another, which call it by the same name."""
    part = c10d.ProcessGroup(c10d.PrefixStore(name, pg.get_group_store()), rank, size)
    part._set_group_name(f"{pg.group_name}/{name}")
    return part


def _backend_of(backend: str, store: Any, pg: Any, timeout: timedelta, ranks: list[int]) -> tuple[Any, Any]:
    """Return a backend's type, and a backend of the group's ranks."""
    native = getattr(c10d, f"ProcessGroup{backend.upper()}", None)
    if native is not None:
        options = native.Options()
        options._timeout, options.global_ranks_in_group, options.group_name = timeout, ranks, pg.group_name
        return getattr(_KINDS, backend.upper()), native(store, pg.rank(), pg.size(), options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise ProcessGroupError(f"torch.distributed has no backend {backend!r}, which the process group was made with")
    if not plugin.extended_api:
        return _KINDS.CUSTOM, plugin.creator_fn(store, pg.rank(), pg.size(), timeout)
    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, pg.rank(), pg.size()
    options.timeout, options.group_id, options.global_ranks_in_group = timeout, pg.group_name, ranks
    return _KINDS.CUSTOM, plugin.creator_fn(options, None)


def abort_device_backend(pg: Any, device_type: str) -> None:
    """End a device backend of this rank alone, whatever the other ranks do.

    NCCL's own shutdown would wait for the kernels of all ranks of the host, of which some may never end. Between hosts
    the last kernel of this rank may be over before all that it sends has left: a rank that closes an optimizer at once
    after a step may cost the others that step.
    """
    pg._get_backend(torch.device(device_type)).abort()
