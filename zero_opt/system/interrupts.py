"""Stretches of code in which no Ctrl-C, nor another signal with a handler in Python, must fall; errors of handlers."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps: it makes no member of an enum of each number
import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_SIGNAL_NUMBERS = tuple(_signal.valid_signals())


def by_handler(error: BaseException) -> bool:
    """Return whether a signal handler has raised the error that the caller has caught.

    To be asked where all else that raises is native code, called by this library: what it raises has passed no other
    function of Python, and a handler is one.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).partition(".")[0] != _PACKAGE for frame in frames)


class _Stretch:
    """One stretch of code in which signals are kept: on the main thread, in place of the handlers of all of them.

    Attributes:
        handlers: by signal. over: whether signals are handled again. thread: the main thread's number.
    """

    def __init__(self) -> None:
        callables = ((number, found) for number in _SIGNAL_NUMBERS if callable(found := _signal.getsignal(number)))
        self.handlers: dict[int, Callable[..., Any]] = {number: _handler(number, found) for number, found in callables}
        self._kept: dict[int, FrameType | None] = {}
        self._left = [*self.handlers]  # of these, those that are not put back
        self.over, self.thread = False, threading.get_ident()

    def begin(self) -> None:
        """Keep signals from here on."""
        for number in self.handlers:
            _signal.signal(number, self._keep)

    def end(self) -> None:
        """Handle what was kept, and put the handlers back, all of them, whichever raises."""
        try:
            self._deliver()
        finally:
            self.over = True
            try:
                self.put_back()
            finally:
                self._deliver()

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._kept[number] = frame
        if self.over:  # a signal has come before its handler was put back
            self._deliver()

    def _deliver(self) -> None:
        while self._kept:
            number, frame = self._kept.popitem()
            try:
                self.handlers[number](number, frame)
            except BaseException:
                self._deliver()
                raise

    def put_back(self) -> None:
        """Put the handlers back, but for those in whose place a handler has put another."""
        while self._left:
            number = self._left.pop()
            try:
                self._restore(number)
            except BaseException:  # of a handler that is back already
                self._restore(number)
                self.put_back()
                raise

    def _restore(self, number: int) -> None:
        if _signal.getsignal(number) == self._keep:
            _signal.signal(number, self.handlers[number])


def _handler(number: int, found: Callable[..., Any]) -> Callable[..., Any]:
    """Return a signal's handler, also where a stretch that is over could not put it back, and calls it."""
    while isinstance(stretch := getattr(found, "__self__", None), _Stretch) and stretch.over:
        found = stretch.handlers[number]
    return found


# Those of the main thread that have begun and not ended.
_stretches: list[_Stretch] = []


def _end_in_child() -> None:
    """Put handlers back in a child that another thread has forked: there, the main thread ends no stretch."""
    for stretch in reversed(_stretches):
        if stretch.thread != threading.get_ident():
            stretch.over = True
            stretch.put_back()


os.register_at_fork(after_in_child=_end_in_child)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it, signals are kept for its end: for a few milliseconds of work, as a step of a class on zeros.

    No waiting, but for a thread that starts, and at the exit.

    Only the main thread is ever interrupted, and only where a Python function handles the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stretch = _Stretch()
    _stretches.append(stretch)
    try:
        stretch.begin()
        yield
    finally:
        try:
            stretch.end()
        finally:
            _stretches.remove(stretch)
