"""The process groups of one optimizer, and who serves its state over one of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch.distributed as dist

from .collectives import AloneGroup, DeviceGroup, Group, SideGroup, connect
from .comm.connecting import made_by_all
from .consolidate import LocalState
from .partition import Partition
from .placement import Placement
from .policies import Checks
from .state_guard import StateGuard
from .state_service import StateService


class OwnGroups:
    """Process groups of one optimizer: one each for reduction, gather and control, so their traffic cannot cross.

    Accelerator tensors all travel by the communicator of ``reduce``, since a rank enqueues them in one order.

    Attributes:
        neighbours: ranks of which some may share this host's cores and files with this one.
        service: serves this rank's state over a group of its own, if the ranks are processes.
    """

    def __init__(self, parent: dist.ProcessGroup | None, checks: Checks, neighbours: Group | None = None) -> None:
        several = None if parent is None or parent.size() == 1 else parent
        self.service: StateService | None = None
        self._side: SideGroup | None = None
        self.control: Group
        self.reduce: Group
        self.gather: Group
        if several is None:
            self.control = self.reduce = self.gather = AloneGroup()
        else:
            self._make(several, checks.timeout)
        self.control.watch(checks.hang_timeout)
        self.neighbours = neighbours or self.control

    def _make(self, parent: dist.ProcessGroup, timeout: float | None) -> None:
        connecting = connect(parent, groups=4)
        with made_by_all(connecting) as made:
            for kind, purpose in ((Group, "control"), (DeviceGroup, "reduce"), (Group, "gather")):
                made.append(kind(parent, timeout, purpose, connecting))
            self.control, self.reduce, self.gather = made
            if connecting is not None:  # the ranks are processes
                self._side = SideGroup(parent, timeout, "state", connecting)
                made.append(self._side)

    def serve(self, guard: StateGuard, placement: Placement, partition: Partition) -> None:
        """Begin to serve this rank's state. All ranks should."""
        if self._side is not None and self.service is None:
            # Nothing that leads to the optimizer, so that it can be collected while it is served.
            capture = partial(LocalState, placement, partition.flats, partition.buckets, partition.whole)
            self.service = StateService(self._side, guard, capture, partition.flats, self.control)

    def in_step(self) -> AbstractContextManager[None]:
        """See :meth:`StateService.in_step`."""
        return nullcontext() if self.service is None else self.service.in_step()

    def close(self) -> None:
        """Destroy all of them; that of the service once all ranks have closed."""
        if self.service is not None:
            self.service.abandon()
        elif self._side is not None:
            self._side.close()
        for group in (self.reduce, self.gather, self.control):
            group.close()
