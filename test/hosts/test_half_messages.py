"""A rank of another host that is killed while a large message from it is half received: gloo ends no wait for that."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.hosts.network import Network
from test.support.harness import Failure, run_processes
from zero_opt.comm import process_exit, ring
from zero_opt.state import service
from zero_opt.system import background_thread
from zero_opt.system.waiting import until

SECONDS = 300  # nothing hangs; the group's timeout is longer
RATE, WIDTH = 8e6, 700_000  # a parameter of 8 MB, of which a shard takes four seconds
ROWS = 3  # of which each rank owns one and a half
SHARD_BYTES = ROWS * WIDTH * 4 // 2


def _die_after(network: Network, nbytes: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Send this rank a signal once so much more has come to the other host."""
    rank, begun = dist.get_rank(), network.carried()

    def watch() -> None:
        while network.carried()[rank][0] - begun[rank][0] < nbytes:
            time.sleep(0.01)
        os.kill(os.getpid(), by)

    threading.Thread(target=watch, daemon=True).start()


def _connect(rank: int, world_size: int, network: Network) -> None:
    torch.set_num_threads(1)
    network.join(rank)
    store, timeout = dist.FileStore(str(network.folder / "store"), world_size), timedelta(seconds=2 * SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _late_gather(model: nn.Module, optimizer: Any) -> None:
    _step(model, optimizer)
    optimizer.flush()


# What both ranks do, or the one that lives; and how much the other one has sent before its message of a shard or so.
CALLS: dict[str, tuple[Callable[[nn.Module, Any], object], int]] = {
    "reduction": (_step, 0),
    "gather": (_step, SHARD_BYTES),
    "late gather": (_late_gather, SHARD_BYTES),
    "collective": (lambda _, optimizer: optimizer._group.broadcast(torch.ones(SHARD_BYTES // 4), 0), 0),
    "state_dict": (lambda _, optimizer: optimizer.state_dict(), 0),
    "consolidate_state_dict": (lambda _, optimizer: optimizer.consolidate_state_dict(to=1), 0),
    "sharded_state_dict": (lambda _, optimizer: zero_opt.sharded_state_dict(optimizer), 0),
}


def _dies(call: str) -> int:
    """The rank that dies: the one that sends."""
    return int(call == "sharded_state_dict")


def _peer_dies(rank: int, world_size: int, network: Network, call: str) -> list[str]:
    """What the rank that lives is told, at first and by the calls that follow."""
    _connect(rank, world_size, network)
    model = nn.Linear(WIDTH, ROWS, bias=False)
    late = zero_opt.Overlapped(overlap_param_gather=model if call == "late gather" else None)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, reduction=late, fused=True)
    _step(model, optimizer)
    optimizer.flush()
    dist.barrier()
    (called, sent), dies = CALLS[call], _dies(call)
    if rank == dies:
        network.link(rate=RATE, round_trip_s=0.0)
        _die_after(network, sent + SHARD_BYTES // 32)
    dist.barrier()
    said = []
    for each in (lambda: called(model, optimizer), lambda: _step(model, optimizer), optimizer.state_dict):
        if rank == dies and call == "state_dict":
            time.sleep(SECONDS)
        with pytest.raises(zero_opt.PeerLost) as caught:
            each()
        said.append(str(caught.value))
    optimizer.close()
    process_exit.serve_to_the_end()
    return said


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed_within_a_message_is_lost(call: str, two_hosts: Network) -> None:
    ranks, dies = (2, _peer_dies, two_hosts, call), _dies(call)
    found = run_processes(*ranks, timeout=SECONDS, backend=None, expect_errors=True)
    killed, said = found[dies], found[1 - dies]
    assert isinstance(killed, Failure) and killed.type_name == "Died"
    assert isinstance(said, list), said
    for text in said:
        why = text.removeprefix("this rank's state is that of no step, since step 1 was left half-way: ")
        assert why.startswith(f"rank {dies} has ended, or its host does not answer, while "), said
        assert "restart all ranks from the last checkpoint" in text, said


def _closed_peer_dies(rank: int, world_size: int, network: Network) -> str:
    """What the last rank that has not closed is told when it asks for state."""
    _connect(rank, world_size, network)
    model = nn.Linear(WIDTH, ROWS, bias=False)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    _step(model, optimizer)
    departures = optimizer._engine._groups.control.watch.departures  # type: ignore[union-attr]
    if rank == 0:
        optimizer.close()
        network.link(rate=RATE, round_trip_s=0.0)
        _die_after(network, SHARD_BYTES // 4)
    dist.barrier()
    time.sleep(SECONDS * (rank == 0))
    assert until(lambda: departures.knows(0), SECONDS)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.state_dict()
    return str(caught.value)


def test_a_rank_that_has_closed_and_is_killed_within_its_state_is_lost(two_hosts: Network) -> None:
    _, said = run_processes(2, _closed_peer_dies, two_hosts, timeout=SECONDS, backend=None, expect_errors=True)
    assert isinstance(said, str), said
    assert said.startswith("rank 0 has ended, or its host does not answer, while "), said


def _source_dies(rank: int, world_size: int, network: Network) -> str:
    _connect(rank, world_size, network)
    model = nn.Linear(WIDTH, ROWS, bias=False)
    dist.barrier()
    if rank == 0:
        network.link(rate=RATE, round_trip_s=0.0)
        _die_after(network, SHARD_BYTES // 4)
    dist.barrier()
    with pytest.raises(zero_opt.PeerLost) as caught:
        zero_opt.broadcast_params(model)
    return str(caught.value)


def test_a_source_that_is_killed_within_a_tensor_is_lost(two_hosts: Network) -> None:
    found = run_processes(2, _source_dies, two_hosts, timeout=SECONDS, backend=None, expect_errors=True)
    assert isinstance(found[0], Failure) and found[0].type_name == "Died"
    assert isinstance(found[1], str), found[1]
    assert found[1].startswith("rank 0 has ended, or its host does not answer, while broadcast_params()"), found[1]


class _Alarm(Exception):
    """What a signal handler raises."""


def _raise(*_: object) -> None:
    raise _Alarm


def _exit_here() -> None:
    """Do what the interpreter's exit does, which would wait too long where it waits for what nothing ends."""
    service.INTERRUPTION_S = ring.INTERRUPTION_S = process_exit._THREADS_END_S = 10.0 * SECONDS
    background_thread._PATIENCE_S = background_thread._INTERRUPTED_PATIENCE_S = 10.0 * SECONDS
    process_exit.serve_to_the_end()
    background_thread._end_all()


def _one_leaves(rank: int, world_size: int, network: Network) -> None:
    """A signal handler ends the call of rank 1, which sends, in the middle of a message; then both exit."""
    _connect(rank, world_size, network)
    model = nn.Linear(WIDTH, ROWS, bias=False)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    _step(model, optimizer)
    dist.barrier()
    if rank == 1:
        signal.signal(signal.SIGALRM, _raise)
        network.link(rate=RATE, round_trip_s=0.0)
        _die_after(network, SHARD_BYTES // 4, signal.SIGALRM)
    dist.barrier()
    with pytest.raises(_Alarm if rank == 1 else zero_opt.PeerLost):
        optimizer.consolidate_state_dict(to=0)
    optimizer.close()
    _exit_here()


def test_no_exit_waits_for_a_message_in_whose_middle_a_rank_has_left(two_hosts: Network) -> None:
    assert run_processes(2, _one_leaves, two_hosts, timeout=SECONDS, backend=None) == [None, None]


def _asking_rank_dies(rank: int, world_size: int, network: Network) -> None:
    """Rank 0 is killed as it receives state of rank 1, which then exits."""
    _connect(rank, world_size, network)
    model = nn.Linear(WIDTH, ROWS, bias=False)
    optimizer = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    _step(model, optimizer)
    departures = optimizer._engine._groups.control.watch.departures  # type: ignore[union-attr]
    dist.barrier()
    if rank == 0:
        network.link(rate=RATE, round_trip_s=0.0)
        begun = network.carried()[1][0]
        asks = threading.Thread(target=optimizer.state_dict, daemon=True)
        asks.start()
        assert until(lambda: network.carried()[1][0] - begun > SHARD_BYTES // 4, SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    assert until(lambda: departures.knows(0), SECONDS)
    optimizer.close()
    _exit_here()


def test_no_exit_waits_for_state_that_is_half_sent_to_a_rank_that_is_killed(two_hosts: Network) -> None:
    found = run_processes(2, _asking_rank_dies, two_hosts, timeout=SECONDS, backend=None, expect_errors=True)
    assert isinstance(found[0], Failure) and found[0].type_name == "Died"
    assert found[1] is None, found[1]
