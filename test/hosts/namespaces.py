"""Hosts that are network namespaces: made by the ranks themselves, and gone with them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

_NEW_NETWORK = 0x40000000
# Addresses that exist inside the namespaces only.
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")


def _enter_new() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")


def _enter(pid: int) -> None:
    """Enter the network of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as network:
        if libc.setns(network.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def make_link() -> None:
    """Enter a network of this process's own, and make a link in it."""
    _enter_new()
    _ip("link", "add", "wire", "type", "veth", "peer", "name", "end")


def _permitted() -> bool:
    """Whether namespaces and links between them can be made here; tried in a process of its own."""
    trial = "from test.hosts.namespaces import make_link; make_link()"
    done = subprocess.run([sys.executable, "-c", trial], capture_output=True, cwd=Path(__file__).parents[2])
    return done.returncode == 0


def require_namespaces() -> None:
    """Skip the test where there can be no hosts."""
    if not sys.platform.startswith("linux") or not _permitted():
        pytest.skip("network namespaces, or veth links between them, are not permitted here (they need root, and ip)")


def join_host(rank: int, host: int, folder: Path, hosts: int = 2) -> None:
    """Be a rank of one of the hosts, whose first ranks are 0, 1, ...; all ranks call it, before they make connections.

    Two hosts have a link between them. Of three, host 0 has a link to each other one, and a bridge between the links.
    """
    if rank == host:
        _enter_new()
        _ip("link", "set", "lo", "up")
        _say(folder / f"entered_{host}", str(os.getpid()))
        if host == 0:
            others = [_heard(folder / f"entered_{other}") for other in range(1, hosts)]
            _wire(others)
            _say(folder / "wired", "")
        _heard(folder / "wired")
        _ip("addr", "add", f"{ADDRESSES[host]}/24", "dev", "wire")
        _ip("link", "set", "wire", "gso_max_segs", "1")  # what crosses the link are packets of its MTU at the most
        _ip("link", "set", "wire", "up")
        _say(folder / f"up_{host}", str(os.getpid()))
    pids = [int(_heard(folder / f"up_{each}")) for each in range(hosts)]
    if rank != host:
        _enter(pids[host])
    os.environ["GLOO_SOCKET_IFNAME"] = "wire"


def _wire(others: Sequence[str]) -> None:
    """Link this host to others, given a process of each."""
    if len(others) == 1:
        _ip("link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", others[0])
        return
    _ip("link", "add", "wire", "type", "bridge")
    for number, other in enumerate(others):
        _ip("link", "add", f"wire{number}", "type", "veth", "peer", "name", "wire", "netns", other)
        _ip("link", "set", f"wire{number}", "master", "wire")
        _ip("link", "set", f"wire{number}", "up")


def fall_silent(host: int) -> None:
    """Let nothing that this host sends reach the other one any more, as if it had lost power."""
    cut_off(1 - host)


def cut_off(other: int) -> None:
    """Let nothing that this host sends reach one other host any more."""
    _ip("route", "add", "blackhole", f"{ADDRESSES[other]}/32")


def drop_large() -> None:
    """Let nothing that is large reach this host any more, as if a link before it had a smaller MTU and said nothing."""
    _ip("link", "set", "wire", "mtu", "600")


def _say(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def _heard(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()
