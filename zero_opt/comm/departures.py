"""Which ranks take no further part in training, as far as this rank has heard, and why."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import NamedTuple

from ..errors import PeerLost


class How(enum.IntEnum):
    """How a rank has left."""

    CLOSED = 0  # it has closed this optimizer
    ENDED = 1  # its program has ended without an error that can be seen
    FAILED = 2  # an exception has ended its program
    LOST = 3  # it has said nothing: it was killed, or its host does not answer
    SILENT = 4  # another rank has given up waiting for it; it may come yet


class Departure(NamedTuple):
    """One rank that has left.

    Attributes:
        steps: optimizer steps it had taken. calls: calls of all ranks in the control group that it had entered. Both
            are -1 where it has said nothing.
    """

    rank: int
    how: How
    steps: int = -1
    calls: int = -1

    def text(self, name: str, waiting: str) -> str:
        """What an error says of a rank that is not silent.

        Args:
            name: that of the rank. waiting: what waits for a rank that has said nothing.
        """
        when = f"after step {self.steps - 1}" if self.steps else "before its first step"
        batches = "do all ranks have the same number of batches? (torch.distributed.algorithms.Join takes uneven ones)"
        return {
            How.CLOSED: f"rank {self.rank} has closed this optimizer {when}; {batches}",
            How.ENDED: f"rank {self.rank} has ended its program {when}; {batches}",
            How.FAILED: f"rank {self.rank} has ended its program with an exception {when}; look at its log, and "
            "restart all ranks from the last checkpoint",
            How.LOST: f"{name} {waiting}; restart all ranks from the last checkpoint",
        }[self.how]


def _nothing() -> None:
    """There is nothing to leave."""


def _unexplained(text: str, call: int | None = None, patience_s: float | None = None) -> None:
    """Nothing is known."""


def _unknown(rank: int) -> bool:  # noqa: ARG001
    """Nothing is known of other processes."""
    return False


class Departures:
    """What one rank has heard. Threads may use it at the same time.

    Attributes:
        calls: calls of all ranks in the control group that this rank has entered.
        leave: breaks this rank's connections for training, so that no rank waits for it. end: the same, once what is
            queued for other ranks has been sent.
        tell: tells the other ranks of a departure that this one has found out about.
        explain, lives: see :class:`Watch`.
        news: whether other ranks can tell this one.
        given_up: whether a rank that has said nothing is waited for no more. silent: which, where it may come yet.
    """

    def __init__(self) -> None:
        self.calls, self.news = 0, False
        self.leave: Callable[[], None] = _nothing
        self.end: Callable[[], None] = _nothing
        self.given_up, self.silent = False, list[int]()
        self.tell: Callable[[Departure], None] | None = None
        self.explain: Callable[..., PeerLost | None] = _unexplained
        self.lives: Callable[[int], bool] = _unknown
        self._heard: dict[int, Departure] = {}
        self._lock = threading.Lock()

    def hear(self, departure: Departure) -> bool:
        """Take in a departure; whether it is the first that is heard of that rank."""
        with self._lock:
            self.given_up |= departure.how in (How.LOST, How.SILENT)
            if departure.how is How.SILENT:
                fresh = departure.rank not in self.silent
                self.silent += [departure.rank] * fresh
                return fresh
            return self._heard.setdefault(departure.rank, departure) is departure

    def find(self, departure: Departure) -> None:
        """As :meth:`hear`, of what no other rank has told."""
        if self.hear(departure) and self.tell is not None:
            self.tell(departure)

    def knows(self, rank: int) -> bool:
        """Whether that rank is known to have left."""
        return rank in self._heard

    def lost(self) -> Departure | None:
        """The first rank that was lost."""
        with self._lock:
            return next((found for found in self._heard.values() if found.how is How.LOST), None)

    def first(self, call: int | None) -> Departure | None:
        """The rank that is to be named: the first that was lost, else the first that does not come to a call.

        News travel in the order of cause and effect: a rank hears why another one has left before it hears that.

        Args:
            call: of the control group, counted from 1; ``None`` for one that no rank which has left comes to.
        """
        lost = self.lost()
        if lost is not None:
            return lost
        with self._lock:
            return next((found for found in self._heard.values() if call is None or found.calls < call), None)

    def forget(self) -> None:
        """This rank has left: keep nothing of what it used."""
        self.leave = self.end = _nothing
