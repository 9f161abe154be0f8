"""Over DTensors, a host that has lost its network is a lost rank, as over plain parameters."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

import zero_opt
from test.hosts.network import Network
from test.support.fsdp_models import backward, mesh_of, sharded_net, sharded_optimizer
from test.support.harness import run_processes
from zero_opt.comm.keepalive import HostLimits
from zero_opt.optimizer.dtensors import mesh_group

SECONDS = 300  # nothing hangs
SILENT_S, PROBE_S = 3.0, 1.0


def _waits_for_a_silent_host(rank: int, world_size: int, network: Network, call: str) -> str:
    mesh_group.HostLimits = partial(HostLimits, SILENT_S, PROBE_S)  # type: ignore[attr-defined,misc]
    network.join(rank)
    store = dist.FileStore(str(network.folder / "store"), world_size)
    timeout = timedelta(seconds=2 * SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net)
    backward(net, 0, rank)
    optimizer.step()
    backward(net, 1, rank)
    dist.barrier()
    if rank == 1:
        network.ports[1].down = 1
        time.sleep(SECONDS)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.clip_grad_norm_(1.0) if call == "clip_grad_norm_()" else optimizer.consolidate_state_dict(0)
    return str(caught.value)


@pytest.mark.parametrize("call", ["clip_grad_norm_()", "consolidate_state_dict()"])
def test_a_silent_host_is_a_lost_rank(call: str, two_hosts: Network) -> None:
    arguments = 2, _waits_for_a_silent_host, two_hosts, call
    said, _ = run_processes(*arguments, timeout=SECONDS, backend=None, may_hang={1})
    assert said.startswith(f"rank 1 has ended, or its host does not answer, while {call} waits for it"), said
