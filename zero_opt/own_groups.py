"""The process groups of one optimizer, and who serves its state over one of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

import torch.distributed as dist

from .collectives import AloneGroup, DeviceGroup, Group, build_side_group
from .comm.departures import Departures, How
from .comm.keepalive import ending_with_hosts
from .consolidate import LocalState
from .exchange import Exchange
from .partition import Partition
from .placement import Placement
from .policies import Checks
from .serial_thread import SerialThread
from .state_guard import StateGuard
from .state_service import StateService

_numbers = itertools.count()


class OwnGroups:
    """Process groups of one optimizer: one each for reduction, gather and control, so their traffic cannot cross.

    Accelerator tensors all travel by the communicator of ``reduce``, since a rank enqueues them in one order.

    Attributes:
        neighbours: ranks of which some may share this host's cores and files with this one.
        service: serves this rank's state over a group of its own, if the ranks are processes.
    """

    def __init__(self, parent: dist.ProcessGroup | None, checks: Checks, neighbours: Group | None = None) -> None:
        timeout = checks.timeout
        several = None if parent is None or parent.size() == 1 else parent
        # As logs and torch's flight recorder name them: what for, and of which optimizer of this process.
        number = next(_numbers)
        with ending_with_hosts():
            self.control = AloneGroup() if several is None else Group(several, timeout, f"control:{number}")
        self.reduce, self.gather = (
            AloneGroup() if several is None else kind(several, timeout, f"{purpose}:{number}")
            for kind, purpose in ((DeviceGroup, "reduce"), (Group, "gather"))
        )
        self._departures = Departures()
        self.control.watch(checks.hang_timeout, (self.reduce, self.gather), self._departures)
        self._departures.leave, self._departures.end = self._leave, self._leave_in_order
        self._exchanges: Mapping[str, Exchange] = {}
        self._thread: SerialThread | None = None
        self.neighbours = neighbours or self.control
        with ending_with_hosts():
            self._side = build_side_group(several, timeout, f"state:{number}")
        self.service: StateService | None = None

    def leave_with(self, exchanges: Mapping[str, Exchange], thread: SerialThread) -> None:
        """Leave these exchanges too where this rank leaves, in order once ``thread`` has run what is queued."""
        self._exchanges, self._thread = exchanges, thread

    def serve(self, guard: StateGuard, placement: Placement, partition: Partition) -> None:
        """Begin to serve this rank's state. All ranks should."""
        if self._side is not None and self.service is None:
            # Nothing that leads to the optimizer, so that it can be collected while it is served.
            capture = partial(LocalState, placement, partition.flats, partition.buckets, partition.whole)
            self.service = StateService(self._side, guard, capture, partition.flats, self._departures)

    def _leave(self) -> None:
        """Let no rank wait for this one in training, nor this one for another."""
        for exchange in self._exchanges.values():
            exchange.leave()
        for group in (self.control, self.reduce, self.gather):
            group.disconnect()

    def _leave_in_order(self) -> None:
        """As :meth:`_leave`, but for what is queued for other ranks, which is sent first."""
        self.control.disconnect()
        if self._thread is not None and self._thread.takes:
            self._thread.submit(self._leave)
        else:
            self._leave()

    def close(self) -> None:
        """Destroy all of them; that of the service once all ranks have closed."""
        if self.service is not None:
            self.service.abandon(How.CLOSED)
        elif self._side is not None:
            self._side.close()
        self._leave_in_order()
        self._departures.forget()
        for group in (self.reduce, self.gather, self.control):
            group.close()
