"""The user's ranks that groups of our own are made for, and which connections of the user's groups have ended.

A rank that leaves training breaks its connections for training. Those of the user's process group end only with its
process; :class:`MeshGroup` breaks those of a mesh too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..system.devices import HOST
from .backend_errors import ended_at_peer
from .device_backends import group_timeout_s
from .transfers import broken_among


@dataclass(frozen=True)
class Parent:
    """The user's ranks that groups are made for: those of a process group, or of a mesh of any number of dimensions.

    Attributes:
        name: the same on all of them. ranks: global ones. rank: the number of this one among them.
        backends: as torch writes which backend carries tensors of which device. timeout_s: of a collective.
        groups: process groups that connect them, each with the numbers of its ranks among them. Weak, so that
            destroy_process_group() ends the threads of the user's group: one that lasts may abort at exit.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    backends: str
    timeout_s: float
    groups: Sequence[tuple[weakref.ref[dist.ProcessGroup], Sequence[int]]]

    def existing_groups(self) -> Iterator[tuple[dist.ProcessGroup, Sequence[int]]]:
        """Yield those of :attr:`groups` that still exist: nothing here keeps them alive."""
        return ((group, numbers) for reference, numbers in self.groups if (group := reference()) is not None)


def parent_of(given: dist.ProcessGroup | Parent) -> Parent:
    """Return the ranks of a process group as a parent; a parent as it is."""
    if isinstance(given, Parent):
        return given
    ranks, backends = tuple(dist.get_process_group_ranks(given)), str(dist.get_backend_config(given))
    groups = [(weakref.ref(given), range(len(ranks)))]
    return Parent(given.group_name, ranks, dist.get_rank(given), backends, group_timeout_s(given), groups)


def others_in(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks of a process group, by their numbers in it."""
    return [rank for rank in range(group.size()) if rank != group.rank()]


def broken_connections(parent: Parent) -> Iterator[tuple[int, str]]:
    """Yield the numbers of the ranks to which the user's groups have no connection any more, and gloo's words.

    The connections of a group are not known if it is another backend's, or connects on first use.
    """
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0":
        return
    for group, numbers in parent.existing_groups():
        try:
            backend = group._get_backend(HOST)
        except RuntimeError:  # it carries accelerator tensors alone
            continue
        if type(backend).__name__ == "ProcessGroupGloo":
            yield from ((numbers[rank], words) for rank, words in broken_among(group, others_in(group)))


def ranks_gone(parent: Parent) -> list[int]:
    """Return the ranks whose processes have ended their connections of the user's groups, as far as is known."""
    return [rank for rank, text in broken_connections(parent) if ended_at_peer(text)]
