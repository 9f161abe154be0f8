"""A rank that is stopped on another host, while it is asked for its state: nobody can tell whether it lives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import zero_opt
from test.hosts.network import Network
from test.support.harness import run_processes
from test.support.stepped import make_stepped, service_of

SECONDS = 300  # nothing hangs
TIMEOUT_S = 5.0  # of the group


def _stop_before(optimizer: Any, call: str) -> None:
    """Let the process stop before its service's next call of that name."""
    service: Any = service_of(optimizer)
    method = getattr(service, call)

    def stop_and_call(*given: Any) -> Any:
        setattr(service, call, method)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return method(*given)

    setattr(service, call, stop_and_call)


def _is_asked_while_stopped(rank: int, world_size: int, network: Network, before: str) -> list[str]:
    """Rank 1 goes on once rank 0 has given it up, twice; what rank 0 is told. It then asks again."""
    network.join(rank)
    store, told = dist.FileStore(str(network.folder / "store"), world_size), network.folder / "told"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS))
    _, optimizer = make_stepped(2, checks=zero_opt.Checks(timeout=TIMEOUT_S))
    optimizer.flush()
    dist.barrier()
    said = list[str]()
    if rank == 1:
        wake = f"until [ -e {told} ]; do sleep 0.1; done; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])
        _stop_before(optimizer, before)
    dist.barrier()
    if rank == 0:
        for _ in range(2):
            with pytest.raises(zero_opt.PeerLost) as caught:
                optimizer.state_dict()
            said.append(f"{type(caught.value).__name__}: {caught.value}")
        told.touch()
        assert optimizer.state_dict()["state"][0]["step"] == 2
    dist.barrier()
    optimizer.close()
    return said


@pytest.mark.parametrize("before", ["_answer", "_send_elements"])
def test_a_rank_that_is_stopped_on_another_host_has_not_ended_and_can_be_asked_again(
    two_hosts: Network, before: str
) -> None:
    said, _ = run_processes(2, _is_asked_while_stopped, two_hosts, before, timeout=SECONDS, backend=None)
    for words in said:
        assert re.match(r"PeerSilent: rank 1 has not answered in 5 s while state_dict\(\) before step 2 waits", words)
        assert words.endswith(
            "let it go on (kill -CONT) and repeat the call, or restart all ranks from the last checkpoint"
        )
