"""The end of a process: unless it has failed, it serves its state to other ranks until they have closed.

:mod:`multiprocessing` calls :func:`serve_to_the_end`, since its children run nothing that is registered with
:mod:`atexit`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..system.future import Future
from ..system.interrupts import uninterrupted
from ..system.log import log
from ..system.threads import BackgroundThreads
from .departures import How
from .stops import WARN_AFTER_S

# Seconds at most that the process's exit waits for ranks that have not closed.
_EXIT_S = 1800.0
# The same, since a rank was last served, if it is unknown whether the program has failed.
_QUIET_S = 60.0
# Seconds that threads have to end after the last service has ended.
_THREADS_END_S = 5.0


class Service(Protocol):
    """What a rank runs for the others until its process ends: the state service, or the ring of a mesh."""

    def abandon(self, how: How) -> None:
        """Say how this rank leaves, unless the user has closed."""

    def serve_on(self, failed: bool) -> None:
        """Wait for the ranks that need this one, unless the program has ``failed``."""

    def break_off(self) -> None:
        """Break the connections, and wait a little for the threads."""


# The services of this process, and what ends them.
running: set[Service] = set()
_at_end: list[multiprocessing.util.Finalize] = []
# The threads of all services.
threads = BackgroundThreads()
os.register_at_fork(after_in_child=running.clear)
os.register_at_fork(after_in_child=_at_end.clear)


def add(service: Service) -> None:
    """Let a service go on when the process ends."""
    running.add(service)
    if not _at_end:
        atexit.register(_leave_failed)  # runs before handlers registered earlier, as the one that ends threads
        _at_end.append(multiprocessing.util.Finalize(None, serve_to_the_end, exitpriority=0))


def failed() -> bool:
    """Return whether an exception has ended the program, as far as can be told.

    In a child of multiprocessing the exception is still being handled. The code that the main script has given to
    sys.exit() cannot be seen.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None or getattr(sys, "last_value", None) is not None


def _leave_failed() -> None:
    """If the program has failed, tell the other ranks, and end this rank's waits before another exit handler waits."""
    if failed():
        for service in list(running):
            service.abandon(How.FAILED)


def serve_to_the_end() -> None:
    """Serve while other ranks may ask, unless an exception has ended the program: no rank must wait for that.

    Ctrl-C, or another signal whose handler raises, ends the serving, but no care for the threads; see
    [Note: threads at exit].
    """
    has_failed, services = failed(), list(running)
    try:
        for service in services:
            service.abandon(How.FAILED if has_failed else How.ENDED)
        for service in services:
            service.serve_on(has_failed)
    finally:
        with uninterrupted():
            for service in services:
                service.break_off()
            threads.join(_THREADS_END_S)
            threads.hold()


def started(thread: threading.Thread) -> bool:
    """Start a thread; return False if the interpreter is ending and starts none."""
    try:
        threads.start(thread)
    except RuntimeError:
        return False
    return True


class Serving:
    """The number of ranks that are being served, and when the last one was."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.RLock(), Future[None]()  # see [Note: locks and signal handlers]
        self._count, self._last = 0, 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one more rank that is served."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count, self._last = self._count - 1, time.monotonic()

    def end(self) -> None:
        """End :meth:`wait`: no rank will ask any more. Called once."""
        self._ended.set_result(None)

    def wait(self, timeout_s: float, in_order: bool, waits_for: Callable[[], list[int]]) -> None:
        """Wait for :meth:`end`, when the program has ended without an exception that can be seen.

        Args:
            timeout_s: that of the process group. waits_for: the ranks that have not closed, for the log.
            in_order: whether no exception was being handled when the user closed. If so, or in a child of
                multiprocessing, whose exceptions can be seen, the wait is ``timeout_s``; else it is at most a minute
                after a rank was last served.
        """
        known = in_order or multiprocessing.parent_process() is not None
        patience_s, begun = min(timeout_s, _EXIT_S if known else _QUIET_S), time.monotonic()
        warn_at = begun + WARN_AFTER_S
        while (left := self._left(begun, patience_s)) > 0:
            if self._ended.wait(min(left, max(0.01, warn_at - time.monotonic()))):
                return
            if time.monotonic() > warn_at:
                warn_at += _EXIT_S
                log.warning(
                    "this process has ended, and waits for ranks %s, which may still ask for its part of the "
                    "optimizer's state; they should close() it, or end",
                    waits_for(),
                )
        log.warning(
            "this process ends while ranks %s may still ask for its part of the optimizer's state; call close() on "
            "every rank, whose exit waits as long as the group's timeout then, or end later",
            waits_for(),
        )

    def _left(self, begun: float, patience_s: float) -> float:
        """Return the seconds until ``patience_s`` have passed since ``begun`` and since a rank was last served."""
        now = time.monotonic()
        with self._lock:
            since = now if self._count else max(begun, self._last)
        return min(since + patience_s, begun + _EXIT_S) - now
