"""The process groups of one optimizer, and the service of its state over one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from ..comm.alone_group import AloneGroup
from ..comm.connecting import made_by_all
from ..comm.departures import How
from ..comm.device_backends import group_timeout_s
from ..comm.exchange import Exchange
from ..comm.groups import Group, connect
from ..comm.keepalive import HostLimits
from ..comm.peer_watch import Watch
from ..comm.side_group import SideGroup
from ..errors import RankMismatch
from ..placement import Placement
from ..policies import Checks
from ..sharding.partition import Partition
from ..state.consolidate import LocalState
from ..state.guard import StateGuard
from ..state.service import StateService
from ..system.background_thread import SerialThread
from ..system.failures import on_failure


class OwnGroups:
    """Process groups of one optimizer.

    One set of connections carries reductions, gathers and control: messages between two ranks have a tag per use, and
    only the user's thread runs collectives of host tensors. The service's group has connections of its own, since a
    failure to send state must not end training. Ranks that are threads have neither tags nor a service, so they have a
    group per use.

    Attributes:
        reduce, gather, control: the groups of training; one group if ranks are processes. The communicator of
            ``reduce`` carries all accelerator tensors, since a rank enqueues them in one order.
        neighbors: ranks of which some may share this host's cores and files with this one.
        service: serves this rank's state over a group of its own, if the ranks are processes.
    """

    def __init__(
        self, parent: dist.ProcessGroup | None, checks: Checks, neighbors: Group | None = None, *, hosts: int = 1
    ) -> None:
        """``hosts``: as for :class:`Group`."""
        several = None if parent is None or parent.size() == 1 else parent
        self.service: StateService | None = None
        self._guard: StateGuard | None = None
        self._side: SideGroup | None = None
        self._exchanges: Mapping[str, Exchange] = {}
        self._thread: SerialThread | None = None
        self._watch: Watch | None = None
        self._limits = HostLimits()
        alone: Group = AloneGroup()
        self.control = self.reduce = self.gather = alone
        if several is not None:
            timeout_s = group_timeout_s(several) if checks.timeout is None else checks.timeout
            self._limits = HostLimits(timeout_s=timeout_s)
            with on_failure(self._limits.lift):
                self._make(several, checks, hosts)
        self.neighbors = neighbors or self.control

    def _make(self, parent: dist.ProcessGroup, checks: Checks, hosts: int) -> None:
        timeout, connecting = checks.timeout, connect(parent, 2, checks, self._limits, hosts)
        if connecting is None:  # the ranks are threads
            uses = ("reduce", "gather", "control")
            self.reduce, self.gather, self.control = (Group(parent, timeout, use, None) for use in uses)
            return
        with made_by_all(connecting) as made:
            self._limits.hold()  # on the user's connections until the service notices a host that is silent
            self.control = Group(parent, timeout, "reduce", connecting, carries_devices=True, hosts=hosts)
            self.reduce = self.gather = self.control
            made.append(self.control)
            self._side = SideGroup(parent, timeout, "state", connecting)
            self._limits.keep()
            made.append(self._side)
            self._watch = self.control.watch = self._side.beside = connecting.watch
        self._watch.departures.leave, self._watch.departures.end = self._leave, self._leave_in_order

    def leave_with(self, exchanges: Mapping[str, Exchange], thread: SerialThread) -> None:
        """When this rank leaves, also leave these exchanges. ``thread`` runs what is queued for other ranks."""
        self._exchanges, self._thread = exchanges, thread

    def serve(self, guard: StateGuard, placement: Placement, partition: Partition) -> None:
        """Begin to serve this rank's state, as every rank does."""
        if self._side is not None and self._watch is not None and self.service is None:
            # No reference to the optimizer, so that it can be collected while its state is served.
            capture = partial(LocalState, placement, partition.flats, partition.buckets, partition.whole)
            self.service, self._guard = StateService(self._side, guard, capture, self._watch), guard
            self._limits.lift()

    def end_construction(self) -> None:
        """Note that all ranks serve their state, so that the ring tells of departures."""
        if self._watch is not None:
            self._watch.posted.begin_ring()

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """A context in which all ranks make an optimizer over these groups: the others hear of what ends it here alone.

        A RankMismatch is raised on every rank.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankMismatch):
                self.control.leave_interrupted(error, "ShardedOptimizer() in step 0")
            raise

    def _leave(self) -> None:
        """Leave training at once: no rank waits for this one or its state, and this one waits for no other."""
        if self._guard is not None:
            self._guard.finish()
        for exchange in self._exchanges.values():
            exchange.leave()
        for group in (self.control, self.reduce, self.gather):
            group.disconnect()
        if self._thread is not None:
            self.control.broken.leave(self._thread)

    def _leave_in_order(self) -> None:
        """Leave training as :meth:`_leave` does, once what is queued for other ranks has been sent."""
        if self._thread is not None and self._thread.accepts_calls and not self.control.broken.ends_no_wait:
            self._thread.submit(self._leave)
        else:
            self._leave()

    def close(self) -> None:
        """Destroy all groups; the service's once all ranks have closed."""
        if self.service is not None:
            self.service.abandon(How.CLOSED)
        elif self._side is not None:
            self._side.close()
        self._limits.lift()
        self._leave_in_order()
        if self._watch is not None:
            self._watch.departures.forget()
        for group in (self.reduce, self.gather, self.control):
            group.close()
