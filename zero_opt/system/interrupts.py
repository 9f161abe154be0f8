"""Stretches of code in which a Ctrl-C, or another signal that has a handler in Python, must not fall."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

# Those that programs handle. A handler may raise, or call state_dict().
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it, signals are kept for its end: for a few milliseconds of work, and no waiting.

    Only the main thread is ever interrupted, and only where a Python function handles the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    kept: dict[int, FrameType | None] = {}
    for number in handlers:
        signal.signal(number, kept.__setitem__)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with contextlib.ExitStack() as last_first:  # all of them are called, whichever raises
            for caught, frame in kept.items():
                last_first.callback(handlers[signal.Signals(caught)], caught, frame)
