"""Phases of a step: their labels in torch's profilers, and where a thread's seconds go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from torch._C._profiler import _RecordFunctionFast

_here = threading.local()


class Seconds:
    """The seconds that threads spend in :meth:`counted` contexts, by phase; one thread at a time.

    The seconds of a phase within another one count for the inner one alone.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._phase, self._since = "", 0.0

    def turn_to(self, phase: str) -> str:
        """Count for a phase from now on; return the one before."""
        now, before = time.perf_counter(), self._phase
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._phase, self._since = phase, now
        return before

    @contextmanager
    def counted(self, phase: str) -> Iterator[None]:
        """Within the context, the seconds of this thread count here, for ``phase`` where there is no inner one."""
        outer = getattr(_here, "seconds", None)
        if outer is self:  # a call within another
            yield
            return
        _here.seconds, self._phase, self._since = self, phase, time.perf_counter()
        try:
            yield
        finally:
            self.turn_to("")
            _here.seconds = outer

    def take(self) -> Mapping[str, float]:
        """Return the seconds by phase since the last call; within a context, those up to now."""
        if getattr(_here, "seconds", None) is self:
            self.turn_to(self._phase)
        taken, self._seconds = self._seconds, {}
        return taken


class Phase:
    """A context that is one phase of a step, shown as ``zero_opt::NAME`` by torch's profilers."""

    __slots__ = ("_before", "_label", "_name", "_seconds")

    def __init__(self, name: str) -> None:
        self._name, self._label = name, _RecordFunctionFast(f"zero_opt::{name}")

    def __enter__(self) -> None:
        self._label.__enter__()
        self._seconds: Seconds | None = getattr(_here, "seconds", None)
        if self._seconds is not None:
            self._before = self._seconds.turn_to(self._name)

    def __exit__(self, *_: object) -> None:
        if self._seconds is not None:
            self._seconds.turn_to(self._before)
        with suppress(RuntimeError):  # a profiler of all threads has begun within the phase: it has no label to end
            self._label.__exit__(None, None, None)


class BusySeconds:
    """How long a thread has had something to do. It alone writes; any thread reads."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # seconds before, and since when it is busy

    def begin(self) -> None:
        """There is something to do."""
        if self._state[1] is None:
            self._state = self._state[0], time.perf_counter()

    def end(self) -> None:
        """There is nothing to do."""
        self._state = self.seconds, None

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        before, since = self._state
        return before if since is None else before + time.perf_counter() - since
