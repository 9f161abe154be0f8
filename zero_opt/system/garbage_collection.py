"""Stretches of code in which Python's cyclic garbage collector does not start."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


class _Pauses:
    """What keeps the collector, which is the process's, from starting; when the last of them has ended, it goes on.

    A signal handler may come anywhere in these methods. What it interrupts can be called again.
    """

    def __init__(self) -> None:
        self._open: set[object] = set()
        self._enabled = False
        self._lock = threading.RLock()

    def begin(self, pause: object) -> None:
        """Keep it from starting."""
        with self._lock:
            if not self._open:
                self._enabled = gc.isenabled()
            self._open.add(pause)
            gc.disable()

    def end(self, pause: object) -> None:
        """End a pause, if it has begun."""
        with self._lock:
            if self._open == {pause} and self._enabled:
                gc.enable()
            self._open.discard(pause)

    def forget(self) -> None:
        """End all, in a forked child, which has none of the threads."""
        if self._open and self._enabled:
            gc.enable()
        self._open, self._lock = set(), threading.RLock()


_paused = _Pauses()
os.register_at_fork(after_in_child=_paused.forget)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Within it, no garbage collection starts by itself: for code that makes many objects to keep, and does not wait.

    The number of objects made starts a collection, and a full one looks at every object of the program. With state of
    10,000 parameters, calls that make state dicts took two to three times as long with it.
    """
    pause = object()
    try:
        _paused.begin(pause)
        yield
    finally:
        try:
            _paused.end(pause)
        except BaseException:  # a Ctrl-C must not keep the collector off
            _paused.end(pause)
            raise
