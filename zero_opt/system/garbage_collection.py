"""Stretches of code in which Python's cyclic garbage collector does not start."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


class _Pauses:
    """How many threads keep the collector, which is the process's, from starting; the last of them lets it go on."""

    def __init__(self) -> None:
        self._count, self._enabled = 0, False
        self._lock = threading.RLock()  # a signal handler may come while it is held

    def begin(self) -> None:
        """Keep it from starting."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._enabled = gc.isenabled()
                gc.disable()

    def end(self) -> None:
        """End one :meth:`begin`."""
        with self._lock:
            enabled, self._count = self._enabled, max(self._count - 1, 0)
            if enabled and not self._count:
                gc.enable()

    def forget(self) -> None:
        """End all, in a forked child, which has none of the threads."""
        if self._count and self._enabled:
            gc.enable()
        self._count, self._lock = 0, threading.RLock()


_paused = _Pauses()
os.register_at_fork(after_in_child=_paused.forget)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Within it, no garbage collection starts by itself: for code that makes many objects to keep, and does not wait.

    The number of objects made starts a collection, and a full one looks at every object of the program. With state of
    10,000 parameters, calls that make state dicts took two to three times as long with it.
    """
    try:
        _paused.begin()  # a Ctrl-C after it must not keep the collector off
        yield
    finally:
        _paused.end()
