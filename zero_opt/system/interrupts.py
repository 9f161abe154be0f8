"""Stretches of code in which no Ctrl-C, nor another signal with a handler in Python, must fall; errors of handlers."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps: it makes no member of an enum of each number
import contextlib
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_SIGNAL_NUMBERS = tuple(_signal.valid_signals())


def by_handler(error: BaseException) -> bool:
    """Return whether a signal handler has raised the error that the caller has caught.

    To be asked where all else that raises is native code, called by this library: what it raises has passed no other
    function of Python, and a handler is one.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).partition(".")[0] != _PACKAGE for frame in frames)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it, signals are kept for its end: for a few milliseconds of work, as a step of a class on zeros.

    No waiting, but for a thread that starts, and at the exit.

    Only the main thread is ever interrupted, and only where a Python function handles the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in _SIGNAL_NUMBERS if callable(handler := _signal.getsignal(number))}
    kept: dict[int, FrameType | None] = {}
    over = False

    def keep(number: int, frame: FrameType | None) -> None:
        kept[number] = frame
        if over:  # a signal has come before the handler was put back
            deliver()

    def deliver() -> None:
        """Call the handlers of what was kept, all of them, whichever raises."""
        if kept:
            number, frame = kept.popitem()
            try:
                handlers[number](number, frame)
            finally:
                deliver()

    def put_back() -> None:
        for number, handler in handlers.items():
            if _signal.getsignal(number) is keep:  # no handler that was called has put in another
                _signal.signal(number, handler)

    try:
        for number in handlers:
            _signal.signal(number, keep)
        yield
    finally:
        over = True
        try:
            put_back()
        except BaseException:  # of a handler that is back: one that is not would be lost
            put_back()
            raise
        finally:
            deliver()
