"""Waits that cannot be cut into slices, on a thread beside the one that looks at the other ranks meanwhile.

[Note: courtesies]
Where the system refuses what gloo sends, as for lack of memory, gloo's thread and the sending one can wait for each
other's locks for ever, and with them every later call about that connection. So what a rank does for the other ranks
alone, once they part, is done on a thread of its own, for which the rank waits a little: it says that it leaves, tells
who has left, and breaks and ends its connections. While one such call has not come back, further ones are left out.

[Note: half a message]
Where a connection ends, gloo ends all waits for its messages but one: that for a message of which a part has arrived.
Nothing else than the time that this wait was given can end it. So the thread that looks at the other ranks gives that
wait up, a little after this rank has broken its connections, and leaves the thread that waits. The interpreter's exit
waits for it until then, and not longer.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from ..errors import PeerLost
from ..system.background_thread import CallingThread, SerialThread, run_apart
from ..system.future import Future
from .stops import LOOK_AGAIN_S


def submitted(thread: SerialThread, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Submit a call to a thread; call it here where there is none, as once the interpreter's exit has begun."""
    try:
        if not thread.ended:
            return thread.submit(call, *arguments)
    except RuntimeError:
        pass
    return CallingThread().submit(call, *arguments)


def outcome(future: Future[Any], lookout: Callable[[], Callable[[], None]]) -> Any:
    """Return the result of a call on another thread, and look at the other ranks until it is there.

    Args:
        lookout: see :meth:`Group.lookout`.
    """
    look = None if future.done() else lookout()
    while look is not None and not future.wait(LOOK_AGAIN_S):
        look()
    return future.result(0)


# Seconds that a rank waits for a courtesy.
_COURTESY_S = 3.0


class Courtesies:
    """What a rank does over one group for the other ranks alone; see [Note: courtesies]."""

    def __init__(self) -> None:
        self._last: Future[Any] | None = None

    @property
    def stuck(self) -> bool:
        """Whether one has not come back."""
        return self._last is not None and not self._last.done()

    def do(self, call: Callable[[], object]) -> None:
        """Do one, unless one is stuck. What it raises is dropped."""
        if not self.stuck:
            self._last = run_apart(call, _COURTESY_S)


class SubmittedCall:
    """A call on a thread, waited for as a backend's work is."""

    def __init__(self, thread: SerialThread, call: Callable[..., Any], *arguments: Any) -> None:
        self._submit: Callable[[], Future[Any]] = lambda: submitted(thread, call, *arguments)

    def begin(self) -> SubmittedCall:
        """Submit the call."""
        self._future = self._submit()
        return self

    def is_completed(self) -> bool:
        """Return whether the call is over."""
        return self._future.done()

    def wait(self, patience: timedelta | None = None) -> None:
        """Return once the call is over, and raise what it has raised; RuntimeError: it is not over in time."""
        if not self._future.wait(None if patience is None else patience.total_seconds()):
            raise RuntimeError("the call is not over")
        error = self._future.exception(0)
        if error is not None:
            raise error.with_traceback(None)  # of the thread, which would look like that of a signal handler

    @property
    def value(self) -> Any:
        """What the call has returned."""
        return self._future.result(0)


# Seconds within which waits end whose connections this rank has broken, and what is said of one that does not.
_WAITS_END_S = 3.0
_BROKEN_OFF = "a message has broken off"


class Broken:
    """Whether this rank has broken its connections of one group; see [Note: half a message]."""

    def __init__(self) -> None:
        self._once, self._at = threading.Lock(), math.inf

    def begin(self) -> bool:
        """Return whether they are to be broken now: ``True`` the first time."""
        first = self._once.acquire(blocking=False)
        if first:
            self._at = time.monotonic()
        return first

    @property
    def waits_end_at(self) -> float:
        """The time, by the monotonic clock, by which every wait that can end has; ``inf`` before they are broken."""
        return self._at + _WAITS_END_S

    @property
    def ends_no_wait(self) -> bool:
        """Whether a wait over them that is not over by now never will be."""
        return time.monotonic() > self.waits_end_at

    def leave(self, thread: SerialThread) -> None:
        """Let the interpreter's exit wait for a thread no longer than until nothing can end its wait over them."""
        thread.leave(self.waits_end_at)

    def lookout(
        self, look: Callable[[], None], explain: Callable[[str], PeerLost | None] = lambda _: None
    ) -> Callable[[], None]:
        """Return a function that does as ``look``, and raises PeerLost in a wait that nothing ends.

        Args:
            explain: see :meth:`Group.explain`.
        """

        def look_on() -> None:
            look()
            if self.ends_no_wait:
                lost = PeerLost(f"the ranks' connections have broken ({_BROKEN_OFF}); restart from the last checkpoint")
                raise explain(_BROKEN_OFF) or lost from RuntimeError(_BROKEN_OFF)

        return look_on


@contextlib.contextmanager
def looked_beside(look: Callable[[], None], interrupt: Callable[[], None]) -> Iterator[None]:
    """A context in which another thread calls ``look``, while the caller, not the main thread, waits where it cannot.

    What ``look`` raises, the context raises, once ``interrupt`` has ended the wait.
    """
    over, raised = threading.Event(), list[PeerLost]()
    thread = SerialThread("zero_opt look", over.set)

    def look_on() -> None:
        while not over.wait(LOOK_AGAIN_S):
            try:
                look()
            except PeerLost as error:
                raised.append(error)
                interrupt()
                return

    with contextlib.suppress(RuntimeError):  # the interpreter's exit has begun; or there are no threads left
        thread.submit(look_on)
    try:
        yield
    except PeerLost:
        if raised:
            raise raised[0] from None
        raise
    finally:
        over.set()
        thread.close()
