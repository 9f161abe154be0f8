"""The ranks that have left training, as far as this rank has heard, and why they left.

[Note: words for ranks that do not come]
- missing: a rank is not in the call in which this rank waits.
- stopped, ended: the process of a rank of this host is suspended (SIGSTOP), or runs no more.
- leave: take no further part in training, and break the connections for it, so that no rank waits.
- departure: what is known of a rank that has left, or for which the others must not wait. :class:`How` has the kinds.
- announce: tell the others of one's own departure.
- notice: find out that another rank has departed, and tell the others.
- cause: a departure that its rank has not announced itself. Because of it, others leave.
- post: put a departure into the store, where the ring may not bring it.
- hear: be told of a departure by another rank, through the ring or the store. What is noticed is recorded alike.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# How often the store is asked in a wait: after a part of the seconds waited, within limits; later if it answers late.
_READ_AGAIN_PART, _READ_AGAIN_S, _READ_AGAIN_AT_MOST_S, _STORE_IS_LATE_S = 0.125, 0.5, 4.0, 10.0


class How(enum.IntEnum):
    """How a rank has left."""

    CLOSED = 0  # it has closed this optimizer
    ENDED = 1  # its program has ended without a visible error
    FAILED = 2  # an exception has ended its program
    LOST = 3  # it has announced nothing: it was killed, or its host does not answer
    SILENT = 4  # another rank has given up waiting for it; it may still come
    INTERRUPTED = 5  # an exception, as of Ctrl-C, has ended a call there that all ranks make; its program may go on
    CUT_OFF = 6  # a connection to it has broken although it lives
    STOPPED = 7  # as SILENT: it is stopped, as a rank of its host has seen
    GAVE_UP = 8  # its program has ended, after it has heard that a rank was lost or given up

    @property
    def serves(self) -> bool:
        """Whether the rank still gives its state to others, until all have closed."""
        return self in (How.CLOSED, How.ENDED, How.INTERRUPTED)

    @property
    def ends_unserved(self) -> bool:
        """Whether the rank's program has ended, and gives its state to no rank."""
        return self in (How.FAILED, How.GAVE_UP)

    @property
    def is_cause(self) -> bool:
        """Whether others tell of the departure, and not the rank itself."""
        return self.may_come or self in (How.LOST, How.CUT_OFF)

    @property
    def may_come(self) -> bool:
        """Whether the rank may still come, although another one has given up waiting for it."""
        return self in (How.SILENT, How.STOPPED)


class Departure(NamedTuple):
    """One rank that has left.

    Attributes:
        steps: optimizer steps that it had taken. calls: collective calls of the control group that it had entered.
            Both are -1 if it has announced nothing.
        from_rank: the rank that cannot reach it, if it is cut off.
    """

    rank: int
    how: How
    steps: int = -1
    calls: int = -1
    from_rank: int = -1

    def as_heard(self, rank: int, from_rank: int) -> Departure:
        """Return what a rank hears if another one tells it of this; one that hears that it is lost is cut off."""
        how = How.CUT_OFF if (self.rank, self.how) == (rank, How.LOST) else self.how
        return self._replace(how=how, from_rank=from_rank)

    def text(self, name: str, waiting: str) -> str:
        """Return what an error says about a rank that is not silent: what has become of it, and what to do.

        Args:
            name: the rank's name. waiting: what is said of a rank that has announced nothing.
        """
        batches = "do all ranks have the same number of batches? (torch.distributed.algorithms.Join takes uneven ones)"
        restart = "restart all ranks from the last checkpoint"
        advice = {How.CLOSED: batches, How.ENDED: batches, How.LOST: restart, How.CUT_OFF: restart}
        return f"{self.became(name, waiting)}; {advice.get(self.how, f'look at its log, and {restart}')}"

    def became(self, name: str, waiting: str = "") -> str:
        """Return what has become of a rank that is not silent; for the arguments see :meth:`text`."""
        when = f"after {self.steps} step{'s' * (self.steps > 1)}" if self.steps else "before its first step"
        return {
            How.CLOSED: f"{name} has closed this optimizer {when}",
            How.ENDED: f"{name} has ended its program {when}",
            How.FAILED: f"{name} has ended its program with an exception {when}",
            How.GAVE_UP: f"{name} has ended its program {when}, once a rank was lost or given up",
            How.LOST: f"{name} {waiting}",
            How.INTERRUPTED: f"{name} has left training {when}, because an exception there, as of Ctrl-C or a signal "
            "handler, has ended a call that all ranks make",
            How.CUT_OFF: f"{name} cannot reach each other any more: the network drops packets (all, where a link is "
            "down; only large ones, where its MTU is too small), or one is stopped on its host",
        }[self.how]


def rank_name(rank: int, global_rank: int, notes: Sequence[str] = ()) -> str:
    """Return what messages call a rank of a group: its number there, its global rank if that is another, and notes."""
    if global_rank not in (-1, rank):
        notes = [f"global rank {global_rank}", *notes]
    return f"rank {rank} ({', '.join(notes)})" if notes else f"rank {rank}"


class RankNames:
    """How messages name the ranks of a group: by their number there, their global one if that is another, and pid."""

    def __init__(self, global_ranks: Sequence[int], pids: Mapping[int, int]) -> None:
        """``pids``: of the other ranks of this host."""
        self._global, self._pids = global_ranks, pids

    def __call__(self, ranks: Sequence[int]) -> str:
        """Return the names of ranks, with their pids on this host."""
        return ", ".join(self.of(rank, [f"pid {self._pids[rank]}"] if rank in self._pids else ()) for rank in ranks)

    def of(self, rank: int, notes: Sequence[str] = ()) -> str:
        """Return the name of a rank, with notes."""
        return rank_name(rank, self._global[rank], notes)


def have(ranks: Sequence[int]) -> str:
    """Return the verb that follows the names of ranks."""
    return "have" if len(ranks) > 1 else "has"


def go_on(ranks: Sequence[int]) -> str:
    """Return what to do about ranks that are stopped while something else than training waits for them."""
    them = "them" if len(ranks) > 1 else "it"
    return f"let {them} go on (kill -CONT) and repeat the call, or restart all ranks from the last checkpoint"


def _no_connections(*_: object) -> None:
    """Do nothing: there are no connections to break, or to tell others by."""


class Departures:
    """The departures that one rank has heard of. Threads may use it at the same time.

    Attributes:
        calls: collective calls of the control group that this rank has entered.
        leave: breaks this rank's connections for training, so that no rank waits for it. end: does the same once what
            is queued for other ranks has been sent.
        tell: tells the other ranks about a departure, by the ring. post: by the store, see :class:`Posted`.
        news: whether other ranks can tell this one about departures.
        silent: the ranks that others have given up waiting for. stopped: those of them that are stopped.
        unanswering: those that something else than training has given up waiting for, and that have not answered
            since. lost_one: whether this rank has lost another, and cannot say which.
    """

    def __init__(self) -> None:
        self.calls, self.news = 0, False
        self.leave: Callable[[], None] = _no_connections
        self.end: Callable[[], None] = _no_connections
        self.silent, self.stopped, self.unanswering = list[int](), set[int](), set[int]()
        self._unannounced = False
        self._being_told, self.lost_one = list[Departure](), False
        self.tell: Callable[[Departure], None] = _no_connections
        self.post: Callable[[Departure], None] = _no_connections
        self._heard: dict[int, Departure] = {}
        self._gone: dict[int, Departure] = {}  # what became of ranks that had left training, and served their state
        self._lock = threading.RLock()  # a signal handler may interrupt the thread that holds it

    def hear(self, departure: Departure) -> bool:
        """Record a departure; returns whether it is the first of that rank."""
        with self._lock:
            if departure.how.may_come:
                fresh = departure.rank not in self.silent
                self.silent += [departure.rank] * fresh
                self.stopped.update([departure.rank] * (departure.how is How.STOPPED))
                self._unannounced = True
                return fresh
            known = self._heard.setdefault(departure.rank, departure)
            lost = departure.how in (How.LOST, How.CUT_OFF)
            if lost and known.how.serves:
                return self._gone.setdefault(departure.rank, departure) is departure
            self._unannounced |= lost
            return known is departure

    @property
    def unannounced(self) -> bool:
        """Whether any rank is lost, cut off or silent, or does not answer."""
        return self._unannounced or bool(self.unanswering)

    @property
    def failed(self) -> bool:
        """Whether this rank has lost another one, or has given up waiting for it, and so serves no state at its end."""
        return self.lost_one or self._unannounced

    def causes(self) -> list[Departure]:
        """Return the departures that are causes. Takes no lock: a thread that holds it may wait for the caller."""
        silent = [Departure(rank, How.STOPPED if rank in self.stopped else How.SILENT) for rank in [*self.silent]]
        return silent + [other for other in [*self._heard.values(), *self._gone.values()] if other.how.is_cause]

    def announced(self, how: How) -> How:
        """Return what the others are told, ``how`` being what becomes of this rank's optimizer or program."""
        return How.GAVE_UP if how is How.ENDED and self.failed else how

    def notice(self, departure: Departure) -> None:
        """Record a departure that this rank has noticed itself, and tell the others if it is new."""
        with self._lock:
            if fresh := self.hear(departure):
                self._being_told.append(departure)
        if fresh:
            self.say(departure)

    def say(self, departure: Departure) -> None:
        """Tell the others of a departure, this rank's own or one that it has noticed."""
        self.tell(departure)
        self.post(departure)
        with contextlib.suppress(ValueError):
            self._being_told.remove(departure)

    def say_untold(self) -> None:
        """Tell the others what another thread has noticed, and may be late to tell: this rank may be about to end."""
        for departure in self._being_told.copy():
            self.say(departure)

    def knows(self, rank: int) -> bool:
        """Return whether a rank is known to have left."""
        return rank in self._heard

    def serves(self, rank: int) -> bool:
        """Return whether a rank gives its state to others, as far as is known."""
        known = self._heard.get(rank)
        return known is None or (known.how.serves and rank not in self._gone)

    def has_lost(self, rank: int) -> bool:
        """Return whether a rank was lost, or cut off, in training."""
        known = self._heard.get(rank)
        return known is not None and known.how in (How.LOST, How.CUT_OFF)

    def of(self, rank: int | None) -> Departure | None:
        """Return what is known of a rank that has left."""
        return None if rank is None else self._heard.get(rank)

    def __iter__(self) -> Iterator[Departure]:
        with self._lock:
            return iter([*self._heard.values(), *self._gone.values()])

    def lost(self) -> Departure | None:
        """Return the first departure of a rank that was lost."""
        with self._lock:
            return next((other for other in self._heard.values() if other.how is How.LOST), None)

    def lost_to(self, rank: int | None) -> Departure | None:
        """Return the departure of a rank that was lost, in training or after it: of ``rank``, or if ``None`` of any."""
        return next((other for other in self if other.how is How.LOST and rank in (None, other.rank)), None)

    def first(self, call: int | None) -> Departure | None:
        """Return the departure to name: that of the first rank that was lost, else of the first that misses a call.

        News arrives in the order of cause and effect: if one rank left because of another, the other one is heard of
        first.

        Args:
            call: number of a call of the control group, from 1; ``None`` for one that every rank misses that has left.
        """
        with self._lock:
            missing = (other for other in self._heard.values() if call is None or other.calls < call)
            return self.lost() or next(missing, None)

    def first_gone(self) -> Departure | None:
        """Return the departure to name where state is waited for: as :meth:`first`, of ranks that do not serve it.

        Those that had left training, and are gone since, come last: they may have ended because of another.
        """
        with self._lock:
            order = (How.LOST, How.CUT_OFF, How.FAILED, How.GAVE_UP)
            gone = [other for other in self._heard.values() if other.how in order]
            return min(gone, key=lambda other: order.index(other.how), default=next(iter(self._gone.values()), None))

    def forget(self) -> None:
        """Drop references to connections, once this rank has left."""
        self.leave = self.end = _no_connections


class Posted:
    """News of departures through the store, which has room for one.

    Once all ranks are in the ring, that tells of departures. But there a rank that is stopped, or was killed while a
    process that it has forked holds its connections, passes nothing on, and no connection breaks. So what others have
    noticed and what ends training is put here then too, and ranks that wait look here, the longer they wait the more
    rarely. One post is enough, and one that was read: this rank asks no more then.
    """

    def __init__(self, departures: Departures, rank: int, store: Any, ask: Callable[[Callable[[], Any]], Any]) -> None:
        """``ask``: returns what a call of the store returns, or ``None``."""
        self._departures, self._rank, self._store, self._ask = departures, rank, store, ask
        self._ring, self._over, self._asked_at = False, False, -math.inf
        departures.post = self.post

    def post(self, departure: Departure) -> None:
        """Say that a rank has left, unless the store already has a departure."""
        if not self._ring or (self._ends_training(departure.rank) and not self._over):
            self._over = self._ring
            self._ask(lambda: self._store.compare_set("departed", "", json.dumps([self._rank, *departure])))

    def _ends_training(self, rank: int) -> bool:
        """Return whether a rank was lost, or given up, in training: not after it had announced that it leaves."""
        return rank in self._departures.silent or self._departures.has_lost(rank)

    def read(self, waited: float = 0.0) -> None:
        """Hear of the departure, if there is one; ``waited``: seconds that this rank has waited for others."""
        again_s = min(max(_READ_AGAIN_S, waited * _READ_AGAIN_PART), _READ_AGAIN_AT_MOST_S) if self._ring else 0.0
        if self._over or time.monotonic() - self._asked_at < again_s:
            return
        said = self._ask(self._said)
        self._asked_at = time.monotonic() + (_STORE_IS_LATE_S if said is None else 0.0)
        if said:
            from_rank, rank, how, *rest = json.loads(said)
            self._departures.hear(Departure(rank, How(how), *rest).as_heard(self._rank, from_rank))
            self._over = self._ring
            if self._ring and self._ends_training(rank):
                self._departures.leave()

    def _said(self) -> bytes:
        return bytes(self._store.get("departed")) if self._store.check(["departed"]) else b""

    def begin_ring(self) -> None:
        """Let the ring tell of departures from here on."""
        self._ring = True

    def end_ring(self) -> None:
        """Let the store alone tell of departures again: the ring has broken."""
        self._ring = False
