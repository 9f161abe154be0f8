"""An exception at any line of a call, wherever that is: as a RecursionError, or one that another thread sets."""

from __future__ import annotations

import dis
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from zero_opt.sharding.flat_param import _counting


class Raised(Exception):
    """What is raised."""


class Place(NamedTuple):
    """A line that begins, or a return."""

    path: str
    line: int
    event: str


def _yields(frame: FrameType) -> bool:
    """Whether a return event is a generator's that goes on later: an exception raised there passes by its handlers."""
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["YIELD_VALUE"]


class Tracer:
    """A trace function that counts how often each place is come to, and raises an exception at one of them.

    Args:
        inside: whether a frame, or one that has called it, is of the call that is looked at.
        counts: whether places count at this moment.

    Attributes:
        places: how often each was come to. due: where to raise, and at which time from 1.
    """

    def __init__(self, inside: Callable[[FrameType], bool], counts: Callable[[], bool]) -> None:
        self._inside, self._counts = inside, counts
        self.places: dict[Place, int] = {}
        self.due: tuple[Place, int] | None = None

    def _of_call(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if self._inside(frame):
                return True
            frame = frame.f_back
        return False

    def _come_to(self, frame: FrameType, event: str, _: Any) -> Any:
        if not (str(frame.f_globals.get("__name__")).startswith("zero_opt.") and self._of_call(frame)):
            return self._come_to
        if (event == "line" or (event == "return" and not _yields(frame))) and self._counts():
            place = Place(frame.f_code.co_filename, frame.f_lineno, event)
            self.places[place] = self.places.get(place, 0) + 1
            if self.due == (place, self.places[place]):
                sys.settrace(None)
                raise Raised(f"{place}")
        return self._come_to

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within the context, this thread is traced, unless the exception is raised, from there on.

        Handlers of signals are put back: the exception may come where they are replaced, or put back, themselves.
        Garbage is collected before and after, as its destructors are not of the call.
        """
        collected = gc.isenabled()
        gc.collect()
        gc.disable()
        before = sys.gettrace()
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self.places.clear()
        sys.settrace(self._come_to)
        try:
            yield
        finally:
            sys.settrace(before)
            # Raised where a with statement ends, before it gives back its lock: where nothing real is raised.
            while _counting._is_owned():  # type: ignore[attr-defined]
                _counting.release()
            if collected:
                gc.enable()
            for number, handler in handlers.items():
                if callable(handler):
                    signal.signal(number, handler)
