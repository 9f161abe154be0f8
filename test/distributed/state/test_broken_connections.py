"""state_dict() on one rank alone, where the network has broken a connection between two ranks that live."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from typing import Any

import pytest
import torch.distributed as dist

import zero_opt
from test.support.harness import run_processes
from test.support.stepped import make_stepped


def _connections() -> dict[tuple[int, int], socket.socket]:
    """Copies of this process's connections, by their ports here and there."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has been closed
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(descriptor)))
            with contextlib.ExitStack() as last_first:
                last_first.callback(copy.close)
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    found[copy.getsockname()[1], copy.getpeername()[1]] = copy
                    last_first.pop_all()
    return found


def _half_closed(rank: int, world_size: int, apart: tuple[int, int], asks: int) -> str:
    """What one rank says to another does not arrive any more, once the ranks have asked each other for state."""
    before = _connections()
    _, optimizer = make_stepped()
    optimizer.state_dict()
    dist.barrier()
    after = {ports: connection for ports, connection in _connections().items() if ports not in before}
    ports: list[Any] = [None] * world_size
    dist.all_gather_object(ports, [*after])
    said = ""
    if rank == apart[0]:
        there = {(far, near) for near, far in ports[apart[1]]}
        for connection in [after[each] for each in after.keys() & there]:
            connection.shutdown(socket.SHUT_WR)
    dist.barrier()
    for connection in (*before.values(), *after.values()):
        connection.close()
    if rank == asks:
        with pytest.raises(zero_opt.PeerLost) as caught:
            optimizer.state_dict()
        said = str(caught.value)
    dist.barrier()
    return said


@pytest.mark.parametrize(("apart", "asks"), [((0, 1), 0), ((0, 1), 1), ((1, 2), 2), ((2, 1), 1)])
def test_a_pull_names_both_ends_of_a_connection_that_the_network_has_broken(apart: tuple[int, int], asks: int) -> None:
    said = run_processes(3, _half_closed, apart, asks)[asks]
    one, other = sorted(apart)
    assert re.match(rf"rank {one}\b[^,]*, rank {other}\b.* cannot reach each other any more", said), said
