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
    try:
        for number in handlers:
            _signal.signal(number, kept.__setitem__)
        yield
    finally:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        with contextlib.ExitStack() as last_first:  # all of them are called, whichever raises
            for caught, frame in kept.items():
                last_first.callback(handlers[caught], caught, frame)
