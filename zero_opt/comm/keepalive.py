"""Connections that end when the other host falls silent because it has lost power or its network.

The kernel's own limits are two hours for an idle connection, and a quarter of an hour for one with unacknowledged data.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

# Seconds that a host may be silent, and seconds between two probes of a silent host.
_SILENT_S, _PROBE_S = 75.0, 10.0
_OPEN_FILES = "/proc/self/fd"


@contextlib.contextmanager
def ending_with_hosts(silent_s: float = _SILENT_S, probe_s: float = _PROBE_S) -> Iterator[None]:
    """A context: connections to other hosts that are made in it end when the host is silent for ``silent_s`` seconds.

    Backends make connections in native code, and offer no way to set this. A stopped process does not count as silent,
    since its kernel answers, until more is sent to it than its kernel accepts: do not send large messages over such
    connections.

    Args:
        probe_s: seconds between two probes of a silent host; the time until a connection ends is rounded up to it.
    """
    before = set(_sockets().values())
    yield
    for fd, name in _sockets().items():
        if name not in before:
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected because it listens
                _end_with_host(fd, silent_s, probe_s)


def _sockets() -> dict[int, str]:
    """Return the kernel's names of this process's sockets, by file descriptor."""
    found = {}
    with contextlib.suppress(OSError):  # not on every platform
        for fd in os.listdir(_OPEN_FILES):
            with contextlib.suppress(OSError):
                name = os.readlink(f"{_OPEN_FILES}/{fd}")
                if name.startswith("socket:"):
                    found[int(fd)] = name
    return found


def _end_with_host(fd: int, silent_s: float, probe_s: float) -> None:
    copy = os.dup(fd)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # another thread has closed it, and opened something else
        os.close(copy)
        raise
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return
        if connection.getsockname()[0] == connection.getpeername()[0]:  # on this host
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(probe_s)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(probe_s)))
        # The first ends idle connections, the second those with unacknowledged data.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(silent_s / probe_s)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silent_s * 1000))
