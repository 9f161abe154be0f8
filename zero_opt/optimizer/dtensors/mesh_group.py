"""The ranks of a DeviceMesh, of any number of dimensions, as one group.

[Note: beside FSDP's collectives]
A call of one rank alone would meet, in the mesh's process groups, the collectives of the other ranks' forward; where
sizes differ, gloo aborts the process. So where a mesh has gloo, each optimizer has connections of its own, and a ring
over them ([Note: the ring]). A rank that leaves training breaks those of the mesh's groups too, so that no rank waits
for it in FSDP's collectives.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.backend_errors import first_line, is_loss, timed_out
from ...comm.backend_exchanges import gathered_over
from ...comm.connecting import Connecting, made_by_all
from ...comm.departures import How, rank_name
from ...comm.groups import INLINE_BYTES, Group
from ...comm.keepalive import HostLimits
from ...comm.parent import Parent, broken_connections, others_in, parent_of
from ...comm.rendezvous import Patience
from ...comm.ring import UnservedRing
from ...comm.short_lived import NamedCallsWatch
from ...comm.side_group import SideGroup
from ...comm.transfers import break_connections, peer_lost
from ...errors import PeerLost
from ...field_checks import waited_for
from ...policies import Checks
from ...system.devices import HOST
from ...system.failures import on_failure
from ...system.future import Future

# Whom a message waits for, as long as nothing is known of the ranks.
ANY = "another rank of the mesh"
# The call that makes an optimizer.
_CONSTRUCTION = "ShardedOptimizer()"
Result = TypeVar("Result")
# The groups of this process that have connections.
_connected: weakref.WeakSet[MeshGroup] = weakref.WeakSet()


class _MeshWatch(NamedCallsWatch):
    """A watch of the calls over one mesh."""

    def last(self, ranks: Sequence[int] = ()) -> str:  # noqa: ARG002  (as for steps)
        return "every rank of the mesh must make that call"

    def failed(self, error: RuntimeError) -> PeerLost | None:
        """Leave, and return the error once a collective of the mesh's own process groups has failed."""
        stopped = self.stopped() if timed_out(first_line(error)) else []
        return self._leave_stopped(stopped) if stopped else self._explain_error(error, 0.0)


class MeshGroup(Group):
    """The ranks of a mesh, as a group that gathers small tensors.

    All ranks of the mesh make the same calls, in one order, of which the first connects them. Without gloo there are no
    connections: calls are collectives of the mesh's backend, in one order with the forward and backward of a sharded
    model too. Ranks are numbered in the order of the default process group, whatever order the mesh has.

    Attributes:
        ranks: in the default process group, ascending.
    """

    watch: _MeshWatch | None = None
    _pg: dist.ProcessGroup | None = None
    _ring: UnservedRing | None = None

    def __init__(self, mesh: Any, checks: Checks) -> None:
        self._device_mesh, self._checks = mesh, checks
        self._arriving = _order_of_arrival(mesh)
        self.ranks: list[int] = sorted(self._arriving)
        self.inline_bytes, self.backend = INLINE_BYTES, "mesh"
        self.rank, self.world_size = self.ranks.index(dist.get_rank()), len(self.ranks)
        groups = _groups_of(mesh)
        self._connects = bool(groups) and all("cpu:gloo" in str(dist.get_backend_config(pg)) for pg in groups)
        self._pid, self._mesh_broken = os.getpid(), threading.Lock()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather a tensor from every rank.

        Raises:
            PeerLost, PeerSilent: a rank has ended, is stopped, or does not come in time.
        """
        if self.watch is not None:
            return super().all_gather(tensor)
        self._require_not_forked()
        rows = tensor.detach().flatten().to(self._device_mesh.device_type)
        for pg in _groups_of(self._device_mesh):
            rows = gathered_over(pg, rows, ANY)
        by_rank = dict(zip(self._arriving, rows.to(tensor.device).view(-1, *tensor.shape), strict=True))
        return [by_rank[rank] for rank in self.ranks]

    def all_gather_bytes(self, payload: bytes, call: str = "", called: str = "") -> list[bytes]:
        if self.watch is not None or not self._connects:
            return super().all_gather_bytes(payload, call, called)
        watch = self._connect(called or call)
        told = super().all_gather_bytes(payload, call, called)
        watch.posted.begin_ring()  # every rank listens to its ring by now
        return told

    @property
    def calls(self) -> int:
        # connecting counts: the other ranks are in the call from then on
        return 0 if self.watch is None else 1 + super().calls

    @property
    def call(self) -> str:
        """The call, as messages name it, that ranks have last compared."""
        return "" if self.watch is None else self.watch.call

    def collective(self, call: str, do: Callable[[], Result]) -> Result:
        """Run ``do``, which calls collectives of the mesh's own process groups, and return its result. Collective.

        ``do`` runs under ``torch.no_grad()``. Over a mesh of host memory it runs on another thread, so that Ctrl-C ends
        the wait.

        Args:
            call: the call that all ranks are in.

        Raises:
            PeerLost: in place of a backend's error about a rank; names it, where it can be told. PeerSilent: a rank is
                stopped.
        """
        other, outcome = 1 - self.rank, Future[Result]()

        def run() -> None:
            try:
                with torch.no_grad():
                    outcome.set_result(do())
            except Exception as error:  # raised below: an exception here would look like the end of the wait
                outcome.set_exception(error)

        who = rank_name(other, self.ranks[other]) if self.world_size == 2 else ANY
        with peer_lost(f"{who}, for which {call} waits,"):
            if self.watch is not None and self._device_mesh.device_type == HOST.type:
                self.aside(run)
            else:  # on the streams of this thread
                run()
            error = outcome.exception(0)
            if self.watch is not None and isinstance(error, RuntimeError) and is_loss(error):
                raise self.watch.failed(error) or error from error
            return outcome.result(0)

    # -- the connections ----------------------------------------------------------------------------------------------

    def _connect(self, call: str) -> _MeshWatch:
        """Connect to the other ranks, and begin the ring; returns the watch of the ranks from here on. Collective.

        Args:
            call: what the user has called.

        Raises:
            PeerLost: the mesh's own connections have broken. Others as for :class:`Connecting`, and the groups.
        """
        parent, timeout = _parent_of(self._device_mesh, self.ranks), self._checks.timeout
        broken = [*broken_connections(parent)]
        if broken:  # if several, nothing tells who ended first: a rank that leaves training breaks all of its own
            ((rank, words), *others) = broken
            what = "connections have" if others else f"connection to {rank_name(rank, parent.ranks[rank])} has"
            raise PeerLost(f"the mesh's {what} broken; restart from the last checkpoint ({words})")
        timeout_s = waited_for(parent.timeout_s if timeout is None else timeout)
        limits, must = HostLimits(timeout_s=timeout_s), "construct it" if call == _CONSTRUCTION else "make that call"
        times = waited_for(parent.timeout_s), timeout_s, self._checks.hang_timeout
        with on_failure(self._forget):
            try:
                connecting = Connecting(parent, 2, Patience(*times, limits, call, must, _MeshWatch))
                with made_by_all(connecting) as made:
                    limits.hold()  # on the mesh's connections until the ring notices a host that is silent
                    super().__init__(parent, timeout, "mesh", connecting)
                    made.append(self)
                    side = SideGroup(parent, timeout, "ring", connecting)
                    limits.keep()
                    made.append(side)
                    assert isinstance(connecting.watch, _MeshWatch), "what patience makes"
                    self.watch = side.beside = watch = connecting.watch
                    watch.departures.leave, watch.departures.end = self.interrupt, self.disconnect
                    self._ring = UnservedRing(side, watch)
            finally:
                limits.lift()
        _connected.add(self)
        return watch

    def _forget(self) -> None:
        """Let the next call connect."""
        self.watch = self._ring = None

    def _user_groups(self) -> Iterable[dist.ProcessGroup]:
        """Yield the mesh's process groups that still exist; none before there are connections."""
        return () if self._parent is None else (pg for pg, _ in self._parent.existing_groups())

    def interrupt(self) -> None:
        super().interrupt()
        if self._parent is not None and os.getpid() == self._pid and self._mesh_broken.acquire(blocking=False):
            self.courtesies.do(partial(_disconnect, self._parent))

    def close(self) -> None:
        """Announce that this rank makes no more calls over the mesh, and close what is not the mesh's own."""
        if self._ring is not None:
            self._ring.abandon(How.CLOSED)
        if self.watch is not None:
            self.watch.departures.forget()
        super().close()


def sharing_a_process_group(groups: Collection[MeshGroup]) -> list[MeshGroup]:
    """Return the connected groups of this process that share a process group with any of ``groups``.

    The connections of such groups break together. Connected members of ``groups`` are always included, even where their
    process groups no longer exist.
    """
    mine = {pg for group in groups for pg in group._user_groups()}
    return [group for group in [*_connected] if group in groups or not mine.isdisjoint(group._user_groups())]


def _groups_of(mesh: Any) -> list[Any]:
    """Return the process groups of several ranks of a mesh: of its last dimension, which has neighbors, first."""
    return [mesh.get_group(dim) for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1]


def _order_of_arrival(mesh: Any) -> list[int]:
    """Return the ranks in the order in which their rows arrive, gathered over one dimension after another, last first.

    torch numbers the ranks of a process group in ascending order.
    """
    here = tuple(mesh.get_coordinate())

    def along(dim: int, *place: int) -> list[int]:
        if dim == mesh.ndim:
            return [int(mesh.mesh[place])]
        places = [(*place, at) for at in range(mesh.size(dim))]  # one group: they differ in this dimension alone
        places.sort(key=lambda there: int(mesh.mesh[(*there, *here[dim + 1 :])]))
        return [rank for there in places for rank in along(dim + 1, *there)]

    return along(0)


def _parent_of(mesh: Any, ranks: Sequence[int]) -> Parent:
    """Return the ranks of a mesh, given in ascending order, as a parent of groups."""
    pgs = _groups_of(mesh)
    parents = [parent_of(pg) for pg in pgs]
    if len(parents) == 1:
        return parents[0]
    name = f"a mesh of {' x '.join(map(str, mesh.shape))} ranks"
    groups = [(weakref.ref(pg), [*map(ranks.index, each.ranks)]) for pg, each in zip(pgs, parents, strict=True)]
    timeout_s = min(each.timeout_s for each in parents)
    return Parent(name, (*ranks,), ranks.index(dist.get_rank()), parents[0].backends, timeout_s, groups)


def _disconnect(parent: Parent) -> None:
    """Break the connections of gloo over a mesh, as :meth:`Group.disconnect` does, so that no rank waits for this one.

    FSDP's collectives end with it, as they do when a wait of gloo's times out.
    """
    for pg, _ in parent.existing_groups():
        break_connections(pg, others_in(pg))
