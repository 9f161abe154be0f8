"""Connections that end when the other host falls silent because it has lost power or its network.

The kernel's own limits are two hours for an idle connection, and a quarter of an hour for one with unacknowledged data.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator, Sequence
from functools import partial

from ..system.failures import on_failure

# Seconds that a host may be silent, and seconds between two probes of a silent host.
_SILENT_S, _PROBE_S = 75.0, 10.0
# A silent host is named before a wait times out, so limits are this part of a short timeout, which leaves time for the
# news. Short outages are borne.
_TIMEOUT_PART, _LEAST_S = 0.6, 15.0
_OPEN_FILES = "/proc/self/fd"
# What is set, in this order: probes at all, when idle for so long, so far apart, so many; unacknowledged for so long.
_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
]


class HostLimits:
    """Limits on connections of this process to other hosts: they end when the host is silent for ``silent_s`` seconds.

    Backends make connections in native code, and offer no way to set this. Connections also end over which large
    packets do not get, though small ones do. A stopped process does not count as silent, since its kernel answers,
    until more is sent to it than its kernel accepts; gloo sends a large message only once its receiver has asked for
    it.
    """

    def __init__(self, silent_s: float = _SILENT_S, probe_s: float = _PROBE_S, *, timeout_s: float = math.inf) -> None:
        """``probe_s``: seconds between two probes of a silent host; an end is late by as much at the most.

        ``timeout_s``: that of waits over the connections. If it is short, so are the limits.
        """
        shorter = min(1.0, max(_LEAST_S, _TIMEOUT_PART * timeout_s) / silent_s)
        self._seconds = silent_s * shorter, probe_s * shorter
        self._before: dict[str, list[int]] = {}

    def hold(self) -> None:
        """Set limits until :meth:`lift`, on all connections that have been made so far."""
        self._before |= self._limited()

    def keep(self) -> None:
        """Set limits for good, on the connections that have been made since :meth:`hold`."""
        self._before |= {name: [] for name in self._limited()}

    def lift(self) -> None:
        """Give connections the options that they had."""
        for fd, name in _sockets().items() if any(self._before.values()) else ():
            if self._before.get(name):
                with contextlib.suppress(OSError), _connection(fd) as connection:
                    _set_options(connection, self._before[name])
        self._before.clear()

    def _limited(self) -> dict[str, list[int]]:
        """Set limits on connections that have none from here; returns the options from before, by name."""
        limited = {}
        for fd, name in _sockets().items():
            if name not in self._before:
                with contextlib.suppress(OSError):  # closed meanwhile, or not connected because it listens
                    limited[name] = _end_with_host(fd, *self._seconds)
        return limited


def _sockets() -> dict[int, str]:
    """Return the kernel's names of this process's sockets, by file descriptor."""
    names = {}
    with contextlib.suppress(OSError):  # not on every platform
        for fd in os.listdir(_OPEN_FILES):
            with contextlib.suppress(OSError):
                name = os.readlink(f"{_OPEN_FILES}/{fd}")
                if name.startswith("socket:"):
                    names[int(fd)] = name
    return names


def _end_with_host(fd: int, silent_s: float, probe_s: float) -> list[int]:
    """Limit how long the other host may be silent; returns the options from before, none if there is no other host."""
    with _connection(fd) as connection:
        kind = connection.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or kind != socket.SOCK_STREAM:
            return []
        if connection.getsockname()[0] == connection.getpeername()[0]:  # on this host
            return []
        before = [connection.getsockopt(*option) for option in _OPTIONS]
        probe = max(1, round(probe_s))
        # The count ends idle connections, the time out those with unacknowledged data.
        _set_options(connection, [1, probe, probe, max(1, round(silent_s / probe)), round(silent_s * 1000)])
        return before


def _set_options(connection: socket.socket, options: Sequence[int]) -> None:
    for option, value in zip(_OPTIONS, options, strict=True):
        connection.setsockopt(*option, value)


@contextlib.contextmanager
def _connection(fd: int) -> Iterator[socket.socket]:
    """A context that has the socket of a descriptor, which it leaves open."""
    copy = os.dup(fd)
    with on_failure(partial(os.close, copy)):  # another thread may have closed it, and opened something else
        # Python makes a socket non-blocking, for its owner too, after socket.setdefaulttimeout(): not one that is said
        # to be non-blocking already.
        connection = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
    with connection:
        yield connection
