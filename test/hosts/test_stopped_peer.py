"""A rank that is stopped on another host, while it is asked for its state: nobody can tell whether it lives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from datetime import timedelta

import pytest
import torch.distributed as dist

import zero_opt
from test.hosts.network import Network
from test.support.harness import run_processes
from test.support.stepped import make_stepped

SECONDS = 300  # nothing hangs
TIMEOUT_S = 15.0  # of the group


def _is_asked_while_stopped(rank: int, world_size: int, network: Network) -> str:
    """Rank 1 goes on once rank 0 has given it up; what rank 0 is told. It then asks again."""
    network.join(rank)
    store, told = dist.FileStore(str(network.folder / "store"), world_size), network.folder / "told"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS))
    _, optimizer = make_stepped(2, checks=zero_opt.Checks(timeout=TIMEOUT_S))
    optimizer.flush()
    dist.barrier()
    said = ""
    if rank == 1:
        wake = f"until [ -e {told} ]; do sleep 0.1; done; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        with pytest.raises(zero_opt.PeerLost) as caught:
            optimizer.state_dict()
        said = f"{type(caught.value).__name__}: {caught.value}"
        told.touch()
        assert optimizer.state_dict()["state"][0]["step"] == 2
    dist.barrier()
    optimizer.close()
    return said


def test_a_rank_that_is_stopped_on_another_host_has_not_ended_and_can_be_asked_again(two_hosts: Network) -> None:
    said, _ = run_processes(2, _is_asked_while_stopped, two_hosts, timeout=SECONDS, backend=None)
    # The longer time where it has said, before it was stopped, that it would answer later.
    assert re.match(
        r"PeerSilent: rank 1 has not answered in (15|30) s while state_dict\(\) before step 2 waits", said
    ), said
    assert said.endswith("let it go on (kill -CONT) and repeat the call, or restart all ranks from the last checkpoint")
