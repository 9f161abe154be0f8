"""Connections that end when the other host is silent: it has lost power, or the network to it.

The kernel's own bounds are two hours for a connection on which nothing is under way, and a quarter of an hour for one
on which something is.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

# Seconds that a host may be silent, and between two questions to one of which nothing is heard.
_SILENT_S, _PROBE_S = 75.0, 10.0
_OPEN_FILES = "/proc/self/fd"


@contextlib.contextmanager
def ending_with_hosts(silent_s: float = _SILENT_S, probe_s: float = _PROBE_S) -> Iterator[None]:
    """Connections to other hosts that are made within it end once those have been silent for ``silent_s`` seconds.

    Backends make connections in native code, and offer no way to set this. A process that is stopped is not silent,
    since its kernel answers, unless so much is sent to it that its kernel takes no more: such connections are not for
    large messages.

    Args:
        probe_s: seconds between two questions to a host of which nothing is heard; what the time is rounded up to.
    """
    before = set(_sockets().values())
    yield
    for fd, name in _sockets().items():
        if name not in before:
            with contextlib.suppress(OSError):  # it is closed again, or listens
                _end_with_host(fd, silent_s, probe_s)


def _sockets() -> dict[int, str]:
    """This process's sockets: names that no other has had, by file descriptor."""
    found = {}
    with contextlib.suppress(OSError):  # not on every platform
        for fd in os.listdir(_OPEN_FILES):
            with contextlib.suppress(OSError):
                name = os.readlink(f"{_OPEN_FILES}/{fd}")
                if name.startswith("socket:"):
                    found[int(fd)] = name
    return found


def _end_with_host(fd: int, silent_s: float, probe_s: float) -> None:
    with socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return
        if connection.getsockname()[0] == connection.getpeername()[0]:  # a host is never silent to itself
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(probe_s)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(probe_s)))
        # While nothing is under way, and while something is.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(silent_s / probe_s)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silent_s * 1000))
