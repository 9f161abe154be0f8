"""The process groups of one optimizer, and who serves its state over one of them."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch.distributed as dist

from .collectives import AloneGroup, DeviceGroup, Group, build_side_group
from .consolidate import LocalState
from .partition import Partition
from .placement import Placement
from .policies import Checks
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
        self.control, self.reduce, self.gather = (
            AloneGroup() if several is None else kind(several, timeout, f"{purpose}:{number}")
            for kind, purpose in ((Group, "control"), (DeviceGroup, "reduce"), (Group, "gather"))
        )
        self.control.watch(checks.hang_timeout)
        self.neighbours = neighbours or self.control
        self._side = build_side_group(several, timeout, f"state:{number}")
        self.service: StateService | None = None

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
