"""The hosts of the other tests are apart from each other, and the network between them does what it is told."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from test.hosts.network import HOST, NETWORK_ALONE, Kind, Network
from test.support.harness import run_processes

PORT = 29500
SENT_BYTES, RATE, ROUND_TRIP_S = 500_000, 8e6, 0.04


def _connected(rank: int, network: Network) -> socket.socket:
    """A connection from host 1 to host 0, of ranks that have joined them."""
    network.join(rank)
    if rank == 0:
        with socket.create_server((network.addresses[0], PORT)) as server:
            (network.folder / "listens").touch()
            return server.accept()[0]
    while not (network.folder / "listens").exists():
        time.sleep(0.01)
    return socket.create_connection((network.addresses[0], PORT), timeout=60)


def _received(connection: socket.socket, count: int) -> None:
    while count:
        count -= len(connection.recv(count))


def _send_and_hear(rank: int, world_size: int, network: Network) -> tuple[float, float]:
    """Seconds of a message there and back, and of a larger one there."""
    with _connected(rank, network) as connection:
        if rank == 0:
            _received(connection, 1)
            connection.sendall(b"1")
            _received(connection, SENT_BYTES)
            connection.sendall(b"2")
            return 0.0, 0.0
        marks = [time.monotonic()]
        for message in (b"1", bytes(SENT_BYTES)):
            connection.sendall(message)
            _received(connection, 1)
            marks.append(time.monotonic())
    return marks[1] - marks[0], marks[2] - marks[1]


def test_rate_and_delay_are_those_that_are_set(two_hosts: Network) -> None:
    two_hosts.link(rate=RATE, round_trip_s=ROUND_TRIP_S)
    _, (small_s, large_s) = run_processes(2, _send_and_hear, two_hosts, backend=None)
    assert small_s > ROUND_TRIP_S and large_s > 8 * SENT_BYTES / RATE + ROUND_TRIP_S
    (sent, received), (back, there) = two_hosts.carried()
    assert (sent, received) == (there, back)
    assert SENT_BYTES < received < 1.1 * SENT_BYTES and sent < 0.1 * SENT_BYTES


def _say_once(rank: int, world_size: int, network: Network) -> bool:
    """Whether a byte from host 1 arrives within a second."""
    with _connected(rank, network) as connection:
        connection.settimeout(1.0)
        network.cut(0, 1)
        if rank == 1:
            connection.sendall(b"1")
        try:
            return bool(connection.recv(1))
        except TimeoutError:
            return False


def test_nothing_gets_through_between_hosts_that_are_cut_apart(two_hosts: Network) -> None:
    assert run_processes(2, _say_once, two_hosts, backend=None) == [False, False]
    assert two_hosts.ports[0].dropped


def _seen(rank: int, world_size: int, network: Network) -> tuple[str, str, list[str], int]:
    network.join(rank)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return os.uname().nodename, boot, os.listdir("/dev/shm"), os.getpid()


@pytest.mark.parametrize("kind", [HOST, NETWORK_ALONE], ids=["host", "network alone"])
def test_hosts_share_what_their_kind_says(kind: Kind, make_network: Callable[..., Network]) -> None:
    one, other = run_processes(2, _seen, make_network(2, kind), backend=None)
    assert (one[0] != other[0]) == (one[1] != other[1]) == (kind == HOST)
    if kind == HOST:
        assert one[2] == other[2] == []
        assert max(one[3], other[3]) < 100  # the pids of a host with few processes
    else:
        assert one[2] == other[2]


def test_nothing_is_left_of_hosts_whatever_happens(make_network: Callable[..., Network]) -> None:
    make_network(1)  # skips the test where there can be none
    with contextlib.suppress(ZeroDivisionError), Network(2) as network:
        pids = [process.pid for process in network._processes]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        raise ZeroDivisionError
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not network.folder.exists()
