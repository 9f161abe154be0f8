"""What a call on another thread returns or raises, once it has.

[Note: locks and signal handlers]
Where a signal handler raises, as for Ctrl-C, the main thread may be at any instruction of Python code. ``Condition``
and ``Event`` of ``threading``, and so ``concurrent.futures``, are such code: a handler that runs once they have taken
their lock, and before ``with`` knows that, leaves it held for ever. A ``Lock`` or an ``RLock`` is taken by ``with``
itself, in one instruction. So threads wait for a :class:`Future`, and hold no lock meanwhile. An ``Event`` serves
threads that no handler interrupts.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Generic, TypeVar

_Returned = TypeVar("_Returned")
# A thread that waits looks again after so many seconds: a handler may have left the lock held.
_AGAIN_S = 1.0


class Future(Generic[_Returned]):
    """The result or the exception of a call, which any number of threads may wait for; see the note of the module."""

    def __init__(self) -> None:
        self._done, self._held = False, threading.Lock()
        self._held.acquire(blocking=False)
        self._error: BaseException | None = None

    def set_result(self, value: _Returned) -> None:
        """End all waits; called once, as :meth:`set_exception` is."""
        self._value, self._done = value, True
        self._held.release()

    def set_exception(self, error: BaseException) -> None:
        """End all waits; :meth:`result` raises ``error``."""
        self._error, self._done = error, True
        self._held.release()

    def done(self) -> bool:
        """Return whether the call is over. Waits for nothing."""
        return self._done

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether the call is over, after so many seconds at the most."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self._done:
            left = _AGAIN_S if end is None else min(end - time.monotonic(), _AGAIN_S)
            if left <= 0:
                return False
            if self._held.acquire(timeout=left):
                self._held.release()
        return True

    def exception(self, seconds: float | None = None) -> BaseException | None:
        """Return what the call has raised; TimeoutError: it is not over in time."""
        if not self.wait(seconds):
            raise TimeoutError
        return self._error

    def result(self, seconds: float | None = None) -> _Returned:
        """Return what the call has returned, or raise what it has raised; TimeoutError: it is not over in time."""
        error: Any = self.exception(seconds)
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error, self  # the traceback has this frame, which would keep the error alive
