"""A host that falls silent, as one that has lost power: who is named, how soon, and that no exit waits for it."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.hosts.network import CONTAINER_OF_ALL_PROCESSES, Network
from test.support.harness import run_processes
from test.support.sampling import long_form
from test.support.stepped import make_stepped, service_of, take_step
from zero_opt.comm import keepalive, peer_watch, process_exit, short_lived
from zero_opt.comm.groups import Group
from zero_opt.comm.keepalive import HostLimits
from zero_opt.comm.lazy_gloo import INTERFACES
from zero_opt.optimizer import process_groups, sharded_optimizer

SECONDS = 300  # nothing hangs
SILENT_S, PROBE_S = 3.0, 1.0
AT_MOST_S = 120
takes_minutes = pytest.mark.skipif(not long_form("HOSTS"), reason="takes minutes: ZERO_OPT_HOSTS=long")


def _init(rank: int, world_size: int, network: Network, timeout_s: float = 2 * SECONDS) -> None:
    """Join a host. Of two, rank 1 has one for itself; of more, each rank has."""
    network.join(rank if len(network.ports) > 2 else int(rank == 1))
    store = dist.FileStore(str(network.folder / "store"), world_size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _fall_silent(network: Network) -> None:
    """Let nothing get to host 1 any more, nor from it, as if it had lost power."""
    network.ports[1].down = 1


def _shorten() -> None:
    """Let hosts be silent for seconds only."""
    process_groups.HostLimits = partial(HostLimits, SILENT_S, PROBE_S)  # type: ignore[attr-defined,misc]


def _one_falls_silent(rank: int, world_size: int, network: Network, when: str, short: bool) -> Any:
    if short:
        _shorten()
    process_exit._QUIET_S = 10.0 * SECONDS
    _init(rank, world_size, network)
    params, optimizer = make_stepped(2)
    if rank == 1:
        if when == "while waited for":
            time.sleep(1)
        _fall_silent(network)
        (network.folder / "silent").touch()
        os.kill(os.getpid(), signal.SIGSTOP)  # what it hears nevertheless it does not answer
        return None
    while when == "before" and not (network.folder / "silent").exists():
        time.sleep(0.01)
    begun = time.monotonic()
    with pytest.raises(zero_opt.PeerLost) as caught:
        take_step(params, optimizer)
    waited = time.monotonic() - begun
    process_exit.serve_to_the_end()
    return type(caught.value).__name__, str(caught.value), waited


@pytest.mark.parametrize("when", ["before", "while waited for"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_silent_host_is_a_lost_rank(world_size: int, when: str, two_hosts: Network) -> None:
    _require_named(world_size, when, two_hosts, short=True)


@takes_minutes
@pytest.mark.parametrize("when", ["before", "while waited for"])
def test_a_silent_host_is_a_lost_rank_within_two_minutes_by_default(when: str, two_hosts: Network) -> None:
    assert _require_named(3, when, two_hosts, short=False) < AT_MOST_S


def _require_named(world_size: int, when: str, network: Network, short: bool) -> float:
    """Fail unless all other ranks name it; the longest that one took."""
    found = run_processes(
        world_size, _one_falls_silent, network, when, short, timeout=SECONDS, backend=None, may_hang={1}
    )
    for name, text, _ in found[:1] + found[2:]:
        assert name == "PeerLost", text
        assert text.startswith("rank 1 has ended, or its host does not answer, while step 2 waits for it"), text
    return max(waited for _, _, waited in found[:1] + found[2:])


def _fall_silent_for_good(network: Network, *_: Any, **__: Any) -> None:
    _fall_silent(network)
    time.sleep(SECONDS)


def _one_falls_silent_in_construction(rank: int, world_size: int, network: Network, where: str, short: bool) -> Any:
    """Rank 1 does before it comes, or once all ranks are connected."""
    if short:
        _shorten()
    _init(rank, world_size, network)
    dist.barrier()
    if rank == 1 and where == "before it comes":
        _fall_silent_for_good(network)
    if rank == 1:
        sharded_optimizer.ShardedEngine = partial(_fall_silent_for_good, network)  # type: ignore[attr-defined]
    begun = time.monotonic()
    with pytest.raises(zero_opt.PeerLost) as caught:
        make_stepped(2)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begun


def _require_named_in_construction(where: str, network: Network, short: bool) -> float:
    ranks = 3, _one_falls_silent_in_construction, network, where, short
    first, _, last = run_processes(*ranks, timeout=SECONDS, backend=None, may_hang={1})
    for name, text, _ in (first, last):
        assert name == "PeerLost", text
        waits = "while another waited for it"
        if where != "before it comes":
            waits = "or the network drops packets, while ShardedOptimizer() before step 0 waits for it"
        assert text.startswith(f"rank 1 has ended, or its host does not answer, {waits}"), text
    return max(first[2], last[2])


WHERE = ["before it comes", "once all are connected"]


@pytest.mark.parametrize("where", WHERE)
def test_a_host_that_falls_silent_in_construction_is_named(where: str, two_hosts: Network) -> None:
    _require_named_in_construction(where, two_hosts, short=True)


@takes_minutes
@pytest.mark.parametrize("where", WHERE)
def test_it_is_named_within_two_minutes_by_default(where: str, two_hosts: Network) -> None:
    assert _require_named_in_construction(where, two_hosts, short=False) < AT_MOST_S


def _limits(network: Network) -> list[int]:
    """Milliseconds that other hosts may be silent, of each connection to one; 0 is no limit."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as each:
            if each.family == socket.AF_INET and each.getpeername()[0] in network.addresses:
                found.append(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return sorted(found)


def _has_limits(rank: int, world_size: int, network: Network) -> tuple[list[int], list[int], list[int]]:
    """Before the construction, when all are connected, and afterwards."""
    _init(rank, world_size, network)
    dist.barrier()
    found, build = [_limits(network)], sharded_optimizer.ShardedEngine

    def look_and_build(*arguments: Any) -> Any:
        found.append(_limits(network))
        return build(*arguments)

    sharded_optimizer.ShardedEngine = look_and_build
    _, optimizer = make_stepped(2)
    found.append(_limits(network))
    dist.barrier()  # a connection ends on both hosts when one closes it
    optimizer.close()
    before, during, after = found
    return before, during, after


def test_connections_of_the_user_have_limits_during_construction_and_own_ones_until_the_end(two_hosts: Network) -> None:
    for before, during, after in run_processes(2, _has_limits, two_hosts, timeout=SECONDS, backend=None):
        assert set(before) == {0} and set(during) == {75_000}
        assert len(during) > len(before) + 1
        assert after == [*[0] * (len(during) - 2), 75_000, 75_000]  # of training, and of state


def _large_packets_are_lost(rank: int, world_size: int, network: Network, short: bool) -> Any:
    """What rank 1 sends gets to rank 0 only in small packets, from the third step on."""
    if short:
        _shorten()
        peer_watch._NEWS_S = 2.0
    _init(rank, world_size, network)
    params, optimizer = make_stepped(2)
    group = optimizer._group
    if rank == 0:
        network.ports[0].mtu = 600
    group.all_gather_bytes(b"dropped")
    begun = time.monotonic()
    with pytest.raises(zero_opt.PeerLost) as caught:
        take_step(params, optimizer)
    return str(caught.value), time.monotonic() - begun


def _require_both_named(world_size: int, network: Network, short: bool) -> float:
    """Fail unless all ranks name one of each host; the longest that one took."""
    found = run_processes(world_size, _large_packets_are_lost, network, short, timeout=SECONDS, backend=None)
    for text, _ in found:
        named = r"rank (\d)(?: \(pid \d+\))?"
        match = re.match(rf"{named}, {named} cannot reach each other any more: the network drops packets", text)
        assert match and "1" in match.groups(), text
    return max(waited for _, waited in found)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_host_to_which_large_packets_do_not_get_is_cut_off(world_size: int, two_hosts: Network) -> None:
    _require_both_named(world_size, two_hosts, short=True)


@takes_minutes
def test_a_host_to_which_large_packets_do_not_get_is_cut_off_within_two_minutes(two_hosts: Network) -> None:
    assert _require_both_named(2, two_hosts, short=False) < AT_MOST_S


CALLS = {
    "step": take_step,
    "consolidate": lambda params, optimizer: optimizer.consolidate_state_dict(),
    "rows": lambda params, optimizer: zero_opt.sharded_state_dict(optimizer),
    "load": lambda params, optimizer: optimizer.load_state_dict(torch.optim.AdamW(params).state_dict()),
    "add_param_group": lambda params, optimizer: optimizer.add_param_group({"params": [torch.zeros(3)]}),
}


def _two_cannot_reach_each_other(
    rank: int, world_size: int, network: Network, call: str, apart: tuple[int, int], timeout_s: float | None
) -> Any:
    """What the call says on this rank, what ``state_dict()`` then says, and how long the call took."""
    if timeout_s is None:
        _shorten()
    _init(rank, world_size, network, timeout_s=timeout_s or 2 * SECONDS)
    params, optimizer = make_stepped(2)
    dist.barrier()
    if rank == apart[0]:
        network.cut(*apart)
    begun, said = time.monotonic(), []
    for each in (lambda: CALLS[call](params, optimizer), optimizer.state_dict):
        with pytest.raises(zero_opt.PeerLost) as caught:
            each()
        said.append(str(caught.value))
    optimizer.close()
    return said, time.monotonic() - begun


def _require_the_two_named(network: Network, call: str, apart: tuple[int, int], timeout_s: float | None) -> float:
    """Fail unless all ranks, one of which reaches both, name the two; the longest that one took."""
    ranks = 3, _two_cannot_reach_each_other, network, call, apart, timeout_s
    found = run_processes(*ranks, timeout=SECONDS, backend=None)
    both = "rank {}, rank {}".format(*sorted(apart))
    for said, _ in found:
        for text in said:
            assert text.startswith(f"{both} cannot reach each other any more"), said
            assert "restart all ranks from the last checkpoint" in text and " does not answer" not in text, said
    return max(waited for _, waited in found)


@pytest.mark.parametrize("call", CALLS)
def test_two_hosts_that_cannot_reach_each_other_are_named_on_all(call: str, three_hosts: Network) -> None:
    _require_the_two_named(three_hosts, call, (1, 2), None)


@pytest.mark.parametrize("apart", [(2, 1), (0, 1), (0, 2)])
def test_so_are_they_wherever_they_are_in_the_ring(apart: tuple[int, int], three_hosts: Network) -> None:
    _require_the_two_named(three_hosts, "step", apart, None)


def test_they_are_named_within_a_timeout_that_is_shorter_than_a_host_may_be_silent(three_hosts: Network) -> None:
    """The limits of connections follow the timeout: the real ones, of more than a minute, would name no rank."""
    _require_the_two_named(three_hosts, "step", (1, 2), 30.0)


def _two_cannot_exchange(rank: int, world_size: int, network: Network) -> list[str]:
    """Ranks 1 and 3 exchange parts of a bucket, and are no neighbors in the ring."""
    _init(rank, world_size, network, timeout_s=30.0)
    param = torch.nn.Parameter(torch.ones(1 << 18))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, fused=True)
    take_step([param], optimizer)
    dist.barrier()
    if rank == 1:
        network.cut(1, 3)
    said = []
    for call in (lambda: take_step([param], optimizer), optimizer.state_dict):
        with pytest.raises(zero_opt.PeerLost) as caught:
            call()
        said.append(str(caught.value))
    optimizer.close()
    return said


def test_so_are_they_where_they_are_no_neighbors_in_the_ring(make_network: Callable[..., Network]) -> None:
    """The ring holds, so the others have the news only from one of the two, and only if that comes in time."""
    for said in run_processes(4, _two_cannot_exchange, make_network(4), timeout=SECONDS, backend=None):
        assert all(text.startswith("rank 1, rank 3 cannot reach each other any more") for text in said), said


def _asks_in_vain(rank: int, world_size: int, network: Network) -> str:
    """Rank 1 does not answer that it lives, as where the store is out of its reach."""
    peer_watch._ALIVE_S = 1.0
    if rank == 1:
        peer_watch.Watch.doubt = lambda *_: None  # type: ignore[method-assign]
    said, _ = _two_cannot_reach_each_other(rank, world_size, network, "step", (1, 2), None)
    first, second = (text.replace("state_dict() before ", "").partition(" (")[0] for text in said)
    assert first == second, said
    return str(said[0])


def test_a_rank_that_lives_hears_which_rank_has_given_it_up_as_lost(three_hosts: Network) -> None:
    first, given_up, last = run_processes(3, _asks_in_vain, three_hosts, timeout=SECONDS, backend=None)
    assert given_up.startswith("rank 1, rank 2 cannot reach each other any more"), given_up
    for text in (first, last):
        assert text.startswith("rank 1 has ended, or its host does not answer, while step 2 waits for it"), text


def _waits_time_out_first(rank: int, world_size: int, network: Network) -> list[str]:
    """Ranks 1 and 2 cannot reach each other, which no connection finds out before their waits time out."""
    keepalive._LEAST_S = 10.0 * SECONDS
    process_groups.HostLimits = partial(HostLimits, 10.0 * SECONDS, SECONDS)  # type: ignore[attr-defined,misc]
    _init(rank, world_size, network, timeout_s=8.0)
    params, optimizer = make_stepped(2)
    dist.barrier()
    if rank == 1:
        network.cut(1, 2)
    said = []
    with pytest.raises(zero_opt.PeerLost) as caught:
        CALLS["add_param_group"](params, optimizer)
    said.append(str(caught.value))
    service = service_of(optimizer)
    service._side.interrupt()
    service._ring.thread.join(SECONDS)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.state_dict()
    said.append(str(caught.value))
    optimizer.close()
    return said


def test_ranks_that_may_be_meant_are_named_where_none_can_tell(three_hosts: Network) -> None:
    found = run_processes(3, _waits_time_out_first, three_hosts, timeout=SECONDS, backend=None)
    for rank, (step, state) in enumerate(found):
        first, second = (other for other in range(3) if other != rank)
        assert step.startswith(f"one of rank {first}, rank {second} has ended, or its host does not answer, or the"), (
            step
        )
        assert state == step


@takes_minutes
def test_two_hosts_that_cannot_reach_each_other_are_named_within_two_minutes(three_hosts: Network) -> None:
    assert _require_the_two_named(three_hosts, "step", (1, 2), 2.0 * SECONDS) < AT_MOST_S


def _containers_of_one_host(rank: int, world_size: int, network: Network) -> str:
    """Of two that see each other's processes, one loses its network."""
    _shorten()
    network.join(rank)
    store = dist.TCPStore(network.addresses[0], 29500, world_size, is_master=rank == 0)  # a port of this network's own
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    params, optimizer = make_stepped(2)
    dist.barrier()
    if rank == 1:
        _fall_silent(network)
    with pytest.raises(zero_opt.PeerLost) as caught:
        take_step(params, optimizer)
    (network.folder / f"told {rank}").touch()
    while not (network.folder / f"told {1 - rank}").exists():
        time.sleep(0.01)
    return str(caught.value)


def test_a_network_that_fails_between_containers_of_one_host_is_named(make_network: Callable[..., Network]) -> None:
    """A process that lives has not ended, and has come, as far as anybody can tell."""
    network = make_network(2, CONTAINER_OF_ALL_PROCESSES)
    for said in run_processes(2, _containers_of_one_host, network, timeout=SECONDS, backend=None):
        assert "the network drops packets" in said and "has not come" not in said, said


def _stops_for_a_while(rank: int, world_size: int, network: Network) -> float:
    """Rank 1 is stopped for longer than a host may be silent, while more is sent to it than its kernel accepts."""
    _shorten()
    _init(rank, world_size, network)
    param = torch.nn.Parameter(torch.ones(8 << 20))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.SGD, lr=1.0)
    dist.barrier()
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep {3 * SILENT_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    param.sum().backward()
    optimizer.step()
    dist.barrier()
    return float(param.detach().sum())


def test_a_rank_that_is_stopped_for_a_while_on_another_host_is_waited_for(two_hosts: Network) -> None:
    assert run_processes(2, _stops_for_a_while, two_hosts, timeout=SECONDS, backend=None) == [0.0, 0.0]


def _passes_nothing_on(rank: int, world_size: int, network: Network, stopped: bool) -> str:
    """Rank 1, beside rank 0 and before rank 2 in the ring, is stopped or killed; its connections stay open."""
    network.join(int(rank == 2))
    store, told = dist.FileStore(str(network.folder / "store"), world_size), network.folder / "told"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS))
    params, optimizer = make_stepped(2, checks=zero_opt.Checks(hang_timeout=1.0))
    if rank == 1:
        holder = 1 if stopped else os.fork()
        while holder == 0 and not told.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP if stopped else signal.SIGKILL)
    with pytest.raises(zero_opt.PeerLost) as caught:
        take_step(params, optimizer)
    if rank == 2:
        told.touch()
    return str(caught.value)


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "killed, beside a forked child"])
def test_a_rank_that_passes_no_news_on_is_named_on_another_host(stopped: bool, two_hosts: Network) -> None:
    ranks = 3, _passes_nothing_on, two_hosts, stopped
    first, _, last = run_processes(*ranks, timeout=SECONDS, backend=None, may_hang={1}, expect_errors=not stopped)
    seen = r"has been stopped for \d+ s" if stopped else "has ended"
    told = "rank 1 has been stopped" if stopped else "rank 1 has ended, or its host does not answer,"
    assert re.match(rf"rank 1 \(pid \d+\) {seen} while step 2 waits for it", first), first
    assert last.startswith(f"{told} while step 2 waits for it, and its last step is 1; restart"), last


def _finds_only_itself(rank: int, world_size: int, network: Network, attempts: int) -> list[str]:
    """Each rank gives the others an address of its own host alone, and frees what it has begun to connect."""
    network.join(int(rank == 2))
    store = dist.FileStore(str(network.folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS))
    os.environ[INTERFACES], said = "lo", list[str]()
    for _ in range(attempts):
        with pytest.raises(zero_opt.ProcessGroupError) as caught:
            make_stepped(0)
        said.append(str(caught.value))
        del caught
        gc.collect()
    return said


def test_ranks_that_have_not_connected_are_told_why_and_can_go_on(two_hosts: Network) -> None:
    """gloo waits for ever for the end of some connections that were half made."""
    for said in run_processes(3, _finds_only_itself, two_hosts, 4, timeout=SECONDS, backend=None):
        assert all("cannot connect to the other ranks: gloo knows an address" in text for text in said), said


def _falls_silent_in_a_broadcast(rank: int, world_size: int, network: Network, where: str, short: bool) -> Any:
    """Rank 1 does before it comes, or after the first tensor."""
    if short:
        short_lived.HostLimits = partial(HostLimits, SILENT_S, PROBE_S)  # type: ignore[attr-defined,misc]
    _init(rank, world_size, network)
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    zero_opt.broadcast_params(model)
    if rank == 1 and where == "before it comes":
        _fall_silent_for_good(network)
    elif rank == 1:
        Group.all_gather_bytes = partial(_fall_silent_for_good, network)  # type: ignore[method-assign,assignment]
    begun = time.monotonic()
    with pytest.raises(zero_opt.PeerLost) as caught:
        zero_opt.broadcast_params(model)
    return str(caught.value), time.monotonic() - begun


def _require_named_in_a_broadcast(where: str, network: Network, short: bool) -> float:
    ranks = 3, _falls_silent_in_a_broadcast, network, where, short
    first, _, last = run_processes(*ranks, timeout=SECONDS, backend=None, may_hang={1})
    for text, _ in (first, last):
        assert text.startswith("rank 1 has ended, or its host does not answer"), text
        assert "broadcast_params()" in text, text
    return max(first[1], last[1])


@pytest.mark.parametrize("where", ["before it comes", "within"])
def test_a_host_that_falls_silent_in_a_broadcast_is_named(where: str, two_hosts: Network) -> None:
    _require_named_in_a_broadcast(where, two_hosts, short=True)


@takes_minutes
@pytest.mark.parametrize("where", ["before it comes", "within"])
def test_it_is_named_in_a_broadcast_within_two_minutes_by_default(where: str, two_hosts: Network) -> None:
    assert _require_named_in_a_broadcast(where, two_hosts, short=False) < AT_MOST_S
