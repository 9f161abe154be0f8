"""A host that loses power where the group's timeout is short, so that all that finds it out follows closely."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

import zero_opt
from test.hosts.network import Network
from test.support.harness import run_processes
from test.support.stepped import make_stepped, take_step
from zero_opt.comm import process_exit

SECONDS = 300  # nothing hangs


def _falls_silent(rank: int, world_size: int, network: Network) -> str:
    network.join(rank)
    store, timeout = dist.FileStore(str(network.folder / "store"), world_size), timedelta(seconds=24)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    params, optimizer = make_stepped(2)
    dist.barrier()
    if rank == 1:
        network.ports[1].down = 1
        os.kill(os.getpid(), signal.SIGSTOP)  # what it hears nevertheless it does not answer
    with pytest.raises(zero_opt.PeerLost) as caught:
        take_step(params, optimizer)
    process_exit.serve_to_the_end()
    return str(caught.value)


def test_a_host_that_loses_power_is_named_alone_by_all_that_exchange_with_it(three_hosts: Network) -> None:
    """Rank 2, the next in the ring, asks whether it lives, and rank 0 waits for that."""
    found = run_processes(3, _falls_silent, three_hosts, timeout=SECONDS, backend=None, may_hang={1})
    for text in (found[0], found[2]):
        assert text.startswith("rank 1 has ended, or its host does not answer, while step 2 waits for it"), text
