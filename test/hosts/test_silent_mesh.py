"""Over DTensors, a host that has lost its network, or cannot reach another, is named as over plain parameters."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

import zero_opt
from test.hosts.network import Network
from test.hosts.training import connect
from test.support.fsdp_models import backward, mesh_of, sharded_net, sharded_optimizer
from test.support.harness import run_processes
from zero_opt.comm import process_exit
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


def _cut_off(rank: int, world_size: int, network: Network) -> str:
    """The hosts of ranks 0, which serves the store, and 1 cannot reach each other; that of rank 2 reaches both."""
    mesh_group.HostLimits = partial(HostLimits, SILENT_S, PROBE_S)  # type: ignore[attr-defined,misc]
    connect(rank, network, (1,) * world_size)
    net = sharded_net(mesh_of((world_size,)))
    optimizer = sharded_optimizer(net)
    backward(net, 0, rank)
    dist.barrier()
    if rank == 0:
        network.cut(0, 1)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.clip_grad_norm_(1.0)
    optimizer.close()
    process_exit.serve_to_the_end()
    return str(caught.value)


def test_hosts_that_cannot_reach_each_other_are_named_and_not_one_that_reaches_both(three_hosts: Network) -> None:
    found = run_processes(3, _cut_off, three_hosts, timeout=SECONDS, backend=None)
    apart, lost = (
        "rank 0, rank 1 cannot reach each other any more",
        "rank 0 has ended, or its host does not answer, while",
    )
    assert found[0].startswith(apart), found[0]
    for said in found[1:]:  # the store, by which rank 0 would say that it lives, is out of the reach of rank 1
        assert said.startswith((apart, lost)), said
