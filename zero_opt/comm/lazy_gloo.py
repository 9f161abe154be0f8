"""Groups of gloo in which two ranks connect when they first have something to say to each other.

gloo by itself connects every pair of ranks, which is a descriptor per rank and group in every process. Here a rank
connects to few: see :func:`partners`, and :meth:`Group.connect` for others.

[Note: connecting on first use]
Of two ranks the one with the greater address connects, and the other one waits for that in its first call about that
rank. A chain of ranks that wait for each other thus has ascending addresses, and no circle. A rank may leave before
another has connected to it: there is no connection whose end would tell, so only the news of its departure does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..system.failures import on_failure
from .store import c10d

# The environment variable that names network interfaces for gloo.
INTERFACES = "GLOO_SOCKET_IFNAME"
# Starts to send a tensor to a rank, or to receive it from there, with a tag; the result is waited for.
Begin = Callable[[Tensor, int, int], Any]


def _interfaces() -> list[str]:
    """Return the network interfaces that torch would use; "" is the one of the host's name."""
    return os.environ.get(INTERFACES, "").split(",")


def never_free(group: Any) -> None:
    """Keep a group, or its backend, even from the interpreter's exit, which frees what modules hold.

    Freeing one waits for its thread: a forked child has none; another is stuck for ever, or busy for ever with a
    connection that was half made.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def lazy_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo backend without connections, over the interfaces that torch would use."""
    gloo = c10d.ProcessGroupGloo
    options, named, default = gloo._Options(), gloo.create_device, gloo.create_default_device
    options._devices = [
        named(interface=name, lazy_init=True) if name else default(lazy_init=True) for name in _interfaces()
    ]
    options._threads, options._timeout = 2 * len(options._devices), timeout
    return gloo(store, rank, size, options)


def greetings(send: Begin, receive: Begin, peers: Iterable[int], tag: int) -> list[tuple[Any, Tensor]]:
    """Start to exchange a byte with ranks over each interface, which connects them; they must do the same.

    Args:
        tag: as many tags from here on are used as there are interfaces, between which gloo chooses by tag.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
    calls = [(peer, tag + number) for peer in sorted(peers) for number in range(len(_interfaces()))]
    return [(begin(room, *call), room) for call in calls for begin in (receive, send) for room in [byte.clone()]]


def greet(gloo: Any, peers: Iterable[int], tag: int, timeout: timedelta) -> None:
    """Connect a backend to ranks, as :func:`greetings` does."""

    def receive(tensor: Tensor, peer: int, tag: int) -> Any:
        return gloo.recv([tensor], peer, tag)

    def send(tensor: Tensor, peer: int, tag: int) -> Any:
        return gloo.send([tensor], peer, tag)

    with on_failure(partial(never_free, gloo)):
        for work, _ in greetings(send, receive, peers, tag):
            work.wait(timeout)


def partners(rank: int, size: int) -> set[int]:
    """Return the ranks at distances that are powers of two: whom collectives of gloo, and :func:`all_gather`, need."""
    distances = [1 << power for power in range((size - 1).bit_length())]
    return {(rank + sign * distance) % size for distance in distances for sign in (1, -1)}


def swaps(pg: Any, tag: int, seconds: float) -> Callable[[Tensor, int, Tensor, int], None]:
    """Return what :func:`all_gather` exchanges tensors by: messages of a process group; it raises the backend's errors.

    Args:
        tag: of the messages, which no others have. seconds: how long each may take.
    """

    def swap(out: Tensor, dst: int, into: Tensor, src: int) -> None:
        for work in [pg.recv([into], src, tag), pg.send([out], dst, tag)]:
            work.wait(timedelta(seconds=seconds))

    return swap


def all_gather(exchange: Callable[[Tensor, int, Tensor, int], None], rank: int, own: Tensor, size: int) -> Tensor:
    """Return all ranks' tensors, like this rank's ``own``, in rank order, in as many rounds as log2 of their number.

    gloo's own sends on what arrives from rank to rank, in as many rounds as there are other ranks.

    Args:
        exchange: sends a tensor to a rank and meanwhile receives one from a rank.
    """
    blocks = torch.empty(size, *own.shape, dtype=own.dtype, device="cpu")
    blocks[0], here = own, 1  # those of this rank and the next ones
    while here < size:
        count = min(here, size - here)
        exchange(blocks[:count], (rank - here) % size, blocks[here : here + count], (rank + here) % size)
        here += count
    return blocks.roll(rank, 0)
