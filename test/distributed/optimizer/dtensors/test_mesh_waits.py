"""Waits for ranks of a mesh: in which order it has them, and what ranks say that are late, stopped or cut off."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import socket
import struct
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.fsdp_models import backward, sharded_net, sharded_optimizer
from test.support.harness import run_processes
from zero_opt.comm import process_identity
from zero_opt.errors import PeerLost, PeerSilent, RankMismatch, StateDictError
from zero_opt.optimizer.dtensors import mesh_params
from zero_opt.system.waiting import until

PERMUTED = {3: [2, 0, 1], 4: [[0, 3], [2, 1]]}


def _made(rank: int, ranks: Any, **options: Any) -> zero_opt.ShardedOptimizer:
    """An optimizer that has taken one step, over a model with gradients of the next."""
    net = sharded_net(DeviceMesh("cpu", ranks, mesh_dim_names=("hosts", "ranks")[-torch.tensor(ranks).ndim :]))
    optimizer = sharded_optimizer(net, **options)
    backward(net, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    backward(net, 1, rank)
    return optimizer


def _in_another_order(rank: int, world_size: int) -> str:
    """One rank comes once the others have looked at the ranks' processes, and one clips to another norm."""
    process_identity.host_if_known = lambda: f"host {rank // 2}"  # type: ignore[attr-defined]
    optimizer = _made(rank, PERMUTED[world_size])
    if rank == 1:
        time.sleep(2.5)
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RankMismatch) as caught:
        optimizer.clip_grad_norm_(2.0 if rank == 2 else 1.0)
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("world_size", PERMUTED)
def test_a_mesh_may_have_its_ranks_in_any_order(world_size: int) -> None:
    for said in run_processes(world_size, _in_another_order):
        assert said.startswith("the norm that gradients are clipped to: 1.0 on rank 0, 2.0 on rank 2;")


def _loads(rank: int, world_size: int, offload: Any) -> str:
    optimizer = _made(rank, PERMUTED[world_size], offload=offload)
    own = optimizer.state_dict()
    full: list[Any] = [None]
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        full = [optimizer.state_dict()]
    dist.broadcast_object_list(full, src=0)
    with pytest.raises(StateDictError) as caught:
        optimizer.load_state_dict(full[0])
    optimizer.load_state_dict(own)
    optimizer.step()
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("offload", [None, zero_opt.WorkerOffload()], ids=["none", "worker"])
@pytest.mark.parametrize("world_size", PERMUTED)
def test_full_state_is_refused_where_torch_would_cut_it_otherwise(world_size: int, offload: Any) -> None:
    for said in run_processes(world_size, _loads, offload):
        assert f"the mesh {PERMUTED[world_size]} are not in ascending order" in said


def _sockets() -> dict[int, tuple[Any, Any]]:
    """The two addresses of each connection of this process, by descriptor."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            connection = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                try:
                    found[fd] = connection.getsockname(), connection.getpeername()
                except OSError:
                    continue
    return found


def _reset(fd: int) -> None:
    """Reset a connection: both sides see a network error, and not the end of a process."""
    unspecified = struct.pack("=H14x", socket.AF_UNSPEC)  # to connect there is to disconnect
    assert ctypes.CDLL(None, use_errno=True).connect(fd, unspecified, len(unspecified)) == 0


def _cut_off(rank: int, world_size: int) -> str:
    """The network ends the connections between ranks 0 and 1 while both live; rank 2 comes once they have left."""
    process_identity.host_if_known = lambda: f"host {rank}"  # type: ignore[attr-defined]
    optimizer, store = _made(rank, [0, 1, 2]), dist.distributed_c10d._get_default_store()
    own, addresses = _sockets(), [None] * world_size
    dist.all_gather_object(addresses, [addresses for addresses, _ in own.values()])
    if rank == 0:
        between = [fd for fd, (_, peer) in own.items() if peer in addresses[1]]  # type: ignore[operator]
        assert between
        for fd in between:
            _reset(fd)
    if rank == 2:
        store.wait(["left 0", "left 1"])
    with pytest.raises(PeerLost) as caught:
        optimizer.clip_grad_norm_(1.0)
    store.set(f"left {rank}", "")
    store.wait([f"left {other}" for other in range(world_size)])
    return str(caught.value)


def test_two_ranks_whose_connection_has_ended_are_named_and_not_the_one_that_is_late() -> None:
    for said in run_processes(3, _cut_off):
        assert said.startswith("rank 0, rank 1 cannot reach each other any more"), said


def _stopped(rank: int, world_size: int) -> str:
    optimizer = _made(rank, [*range(world_size)], checks=zero_opt.Checks(timeout=4 * PATIENCE_S, hang_timeout=0.5))
    if rank == 1:
        mesh_params.full_copy = lambda _: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[attr-defined]
    with pytest.raises(PeerSilent) as caught:
        optimizer.consolidate_state_dict(0)
    return str(caught.value)


def test_a_rank_that_is_stopped_as_state_travels_is_named_after_hang_timeout() -> None:
    said, _ = run_processes(2, _stopped, may_hang={1}, timeout=2 * PATIENCE_S)
    assert re.match(r"rank 1 \(pid \d+\) has been stopped for \d+ s while consolidate_state_dict\(\) waits", said), said


def _interrupted(rank: int, world_size: int) -> str:
    """Rank 1 comes to the transfer of state once Ctrl-C has ended the wait of rank 0."""
    optimizer, store = _made(rank, [*range(world_size)]), dist.distributed_c10d._get_default_store()
    transfer = mesh_params.full_copy

    def transfer_later(value: Any) -> Any:
        if rank == 1:
            store.wait(["interrupted"])
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        return transfer(value)

    mesh_params.full_copy = transfer_later  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt if rank == 0 else PeerLost) as caught:
        optimizer.consolidate_state_dict(0)
    store.set("interrupted", "")
    return str(caught.value)


def test_ctrl_c_gets_through_as_state_travels() -> None:
    _, said = run_processes(2, _interrupted, timeout=2 * PATIENCE_S)
    assert said.startswith("rank 0 has left training after 1 step, because an exception there"), said


def _dropped(rank: int, world_size: int) -> tuple[bool, list[str]]:
    optimizer = _made(rank, [*range(world_size)], max_grad_norm=1.0)
    optimizer.step()
    optimizer.consolidate_state_dict(0)
    (group,) = map(weakref.ref, optimizer._engine._mesh._groups.values())  # type: ignore[attr-defined]
    dist.barrier()
    del optimizer

    def freed() -> bool:
        gc.collect()
        return group() is None and not _own_threads()

    return until(freed, PATIENCE_S), _own_threads()


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zero_opt")]


def test_nothing_is_left_of_an_optimizer_that_is_dropped() -> None:
    assert run_processes(2, _dropped, timeout=2 * PATIENCE_S) == [(True, [])] * 2
