"""Waiting for the other ranks: in slices, so that Ctrl-C gets through, and with a name for who has not come.

[Note: who has left]
A rank that leaves training announces it, and breaks its connections for training. A rank that hears or notices this and
cannot go on leaves too, so no rank waits for another that waits for one that has left. A connection breaks at once,
before the reason is known; the error names the rank that the news is about. A rank that was killed, or whose host does
not answer, announces nothing: its neighbor tells the others; see [Note: the ring]. The words are in ``departures.py``.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..errors import PeerLost, PeerSilent
from ..system.background_thread import SerialThread
from ..system.interrupts import by_handler, uninterrupted
from ..system.log import log
from ..system.waiting import until
from .backend_errors import (
    aside,
    closed_by_peer,
    closed_by_timeout,
    ended_at_peer,
    first_line,
    is_loss,
    network_failed,
    timed_out,
)
from .call_marks import AWAITS_MESSAGE, CallMarks, awaits_message
from .departures import Departure, Departures, How, Posted, RankNames, go_on, have
from .process_identity import ENDED, ProcessIdentity
from .slices import SLICE_S, done_within
from .stops import ANNOUNCED_S, Wait

# A wait is over after so many timeouts, should the backend be stuck, whose own limit is one: see [Note: courtesies].
_OVERDUE = 2.0
# A rank that has waited so long says so in the store, at the latest after this part of its timeout.
_MARK_AFTER_S, _MARK_AFTER_PART = 1.0, 0.25
# How long the store may take to answer: its server may be the rank that is missing.
_STORE_S = 2.0
# How long a process may outlive its connections: where the network may have broken them, and where only its end can.
_CLOSING_S, _ENDING_S = 0.3, 5.0
# How long a rank may take to say that it lives, as another one wants to know whose connection to it has broken.
_ALIVE_S = 5.0
# How long the news of why a connection broke may take, or that a rank is doubted: see :meth:`Watch.doubt`. The
# connections of a lost host may break this far apart; of a short timeout it is a part, so that it comes before the end.
_NEWS_S, _NEWS_PART = 20.0, 0.2
_STOPPED = "Tt"
# More calls than a rank will ever enter: one that every rank misses that has left.
_ANY_CALL = 1 << 62
# A wait that was shorter is not worth saying: this rank heard from another one that it had given up.
_SAID_S = 0.05
# Calls in which this rank is in a step, and the one that all ranks have come to before there is a watch.
_IN_STEPS, _MET = ("step()", "clip_grad_norm_()", "scaler.unscale_()"), "ShardedOptimizer()"


class Watch:
    """Looks, while this rank waits for all ranks, at what keeps it waiting; ``call_marks.py`` says who has not come.

    Attributes:
        step: the step that this rank is in. call: the call that this rank is in. departures: the ranks that have left.
        name: names ranks in messages.
        awaited: the rank whose message an exchange has last waited for.
        posted: the departures in the store. timeout_option: what users write to bound a wait.
        mark_after_s: seconds after which :meth:`mark` is due. overdue: whether the backend is stuck in a wait.
        gone: returns the ranks that have ended their connections of the user's group, as far as is known.
    """

    timeout_option = "checks=Checks(timeout=...)"
    gone: Callable[[], list[int]] = list

    def __init__(
        self, store: Any, rank: int, processes: Sequence[ProcessIdentity], timeouts: tuple[float, float]
    ) -> None:
        """``processes``: by rank. ``timeouts``: of the process group, and for ranks that are stopped."""
        self.step, self.call, self.departures = 0, "step()", Departures()
        self.awaited: int | None = None
        self._store, self._rank, self._marks = store, rank, CallMarks(store, rank, len(processes))
        self._timeout_s, self._hang_timeout_s = timeouts
        self._news_s = min(_NEWS_S, _NEWS_PART * self._timeout_s)
        # So late comes the news from a rank that lives, and waits for news itself before it breaks its connections.
        self._told_s = min(self._news_s + _ALIVE_S, self._timeout_s)
        # News of a doubted rank comes once it has failed to answer, which takes as long under a short timeout.
        self._doubt_s = max(self._news_s, _ALIVE_S + ANNOUNCED_S)
        self.mark_after_s = min(_MARK_AFTER_S, _MARK_AFTER_PART * self._timeout_s)
        self._others = [other for other in range(len(processes)) if other != rank]
        self._near = {r: other for r, other in enumerate(processes) if r != rank and other.is_near(processes[rank])}
        self.name = RankNames([each.global_rank for each in processes], {r: near.pid for r, near in self._near.items()})
        self._ended_at: dict[int, float] = {}  # when ranks of this host were first seen to have ended
        self._entered, self._within = 0, ""  # of which call, if not of a step, this rank waits for all ranks
        self._given_up: PeerSilent | None = None
        self._doubted, self._warned = -math.inf, -1  # when a rank has begun to ask; the last step that the log mentions
        self._together = self.overdue = False  # whether all ranks have come to this call
        self._in_call = False  # whether this rank is within :meth:`naming_call`
        self._says_awaits: bool | None = None  # whether the others know that this rank waits for a message, if it does
        self._thread = SerialThread("zero_opt watch")
        self.posted = Posted(self.departures, rank, store, self._ask)

    def begin(self, call: str) -> None:
        """Note, for messages, the call that this rank begins; "" is a message in the middle of one."""
        if call:
            self.call, self._together = call, call == _MET

    @contextlib.contextmanager
    def naming_call(self) -> Iterator[None]:
        """A context of a whole call: errors name it between its waits for all ranks too, but for a step."""
        outer, self._in_call = self._in_call, True
        try:
            yield
        finally:
            self._in_call = outer
            self._end_wait()

    def wait(self, begin: Callable[[], Any]) -> None:
        """Begin a collective of all ranks, and return when it is over.

        A wait that something else ends, as Ctrl-C or a signal handler's exception, is the last one: what this rank
        waited for may still come, and would answer a later call.

        Raises:
            PeerSilent: a rank of this host is stopped, or one has not come in time. PeerLost: one has left.
            RuntimeError: the backend's, where it is about something else.
        """
        self._entered += 1
        self.departures.calls = self._entered
        patience, work = Wait(self), None
        self._within = "" if self.call in _IN_STEPS else f"{self.call} before "
        try:
            work = begin()
            while not done_within(work, SLICE_S):
                patience.look()
                if patience.waited > _OVERDUE * self._timeout_s:
                    self.overdue = True
                    late = RuntimeError(f"Timed out: the backend's limit of {self._timeout_s:g} s is long over")
                    raise self._explain_error(late, patience.waited) or late
                departure = self.departures.first(self._entered)
                if departure is not None:
                    raise self.explain("", self._entered, _CLOSING_S) or self._leave_departed(departure)
            self._together = True
            self.departures.unanswering.clear()
        except PeerLost:
            raise
        except BaseException as error:
            over = work is None or work.is_completed()
            if over and isinstance(error, RuntimeError) and not by_handler(error):
                raise self._explain_error(error, patience.waited) or error from error
            self.interrupted(error)
            raise
        finally:
            self._end_wait()

    def _end_wait(self) -> None:
        if not self._in_call:
            self._within = ""

    def interrupted(self, error: BaseException, what: str = "") -> None:
        """Leave training, once what the other ranks do not know of has ended ``what`` they share here; tell them.

        Without ``what``, this rank's wait in its step has been ended.
        """
        if self._given_up is not None:
            return
        with uninterrupted():
            self.departures.say(Departure(self._rank, How.INTERRUPTED, self.step, self._entered - 1))
            what = what or f"its wait for the other ranks in {self.where}"
            self._leave(f"{type(error).__name__} has ended {what}; restart all ranks from the last checkpoint")

    def mark(self) -> None:
        """Let the others know that this rank waits."""
        self._ask(partial(self._marks.put, self._entered))

    def missing(self, waited: float = math.inf) -> list[int]:
        """The ranks that have not come, as far as is known; none is known if this rank has waited for less time."""
        marks = self._marked() if waited > self.mark_after_s else {}
        behind = [rank for rank, entered in marks.items() if entered < self._entered]
        return [rank for rank in behind if not awaits_message(marks[rank])] or behind

    @contextlib.contextmanager
    def awaiting_message(self) -> Iterator[None]:
        """A context of a wait for messages, in which this rank keeps no other one waiting; see :meth:`missing`."""
        if self._says_awaits is not None:  # another thread's wait says so
            yield
            return
        self._says_awaits = False
        try:
            yield
            if self._says_awaits:  # else others may still be about to read whom this rank has waited for
                self.mark()
        finally:
            self._says_awaits = None

    def say_awaiting(self, waited: float) -> None:
        """Let the others know, within :meth:`awaiting_message`, that this rank has waited long."""
        if self._says_awaits is False and waited > self.mark_after_s:
            self._says_awaits = True
            self._ask(partial(self._marks.put, self._entered + AWAITS_MESSAGE))

    def _marked(self) -> dict[int, float]:
        """The last :meth:`mark` of each other rank, -1 for none; empty if the store does not answer."""
        return self._ask(partial(self._marks.read, self._entered)) or {}

    def stopped(self) -> list[int]:
        """The ranks of this host that are stopped."""
        return [rank for rank, process in self._near.items() if process.state() in _STOPPED]

    def ended(self, waiting: str = "") -> list[int]:
        """The ranks of this host whose processes have ended without an announcement that this rank has heard of.

        Those that were seen to have ended before others come first: others may have ended because of them. If not a
        step but ``waiting`` waits, for state, a rank is needed until all have closed, whatever it has announced.
        """
        needed = self.departures.serves if waiting else lambda rank: not self.departures.knows(rank)
        ended = [rank for rank, process in self._near.items() if process.state() in ENDED and needed(rank)]
        now = time.monotonic()
        return sorted(ended, key=lambda rank: self._ended_at.setdefault(rank, now))

    def _to_name(self, ended: Sequence[int], call: int | None = None, waiting: str = "") -> Departure | None:
        """Return the departure to name, as :meth:`Departures.first`, once these ranks have ended; see :meth:`ended`.

        Unless another explains it, the first of them, and those that were seen together with it, are taken for lost.
        """
        first = self.departures.first_gone if waiting else partial(self.departures.first, call)
        departure = first()
        gave_up = not waiting and bool(self.departures.silent)  # and ended because of that
        if not ended or gave_up or (departure is not None and departure.how in (How.LOST, How.INTERRUPTED)):
            return departure
        for rank in ended:
            if self._ended_at[rank] == self._ended_at[ended[0]]:
                self.departures.notice(Departure(rank, How.LOST))
        return first()

    def _ended_with(self, rank: int) -> list[int]:
        """Return a rank that was lost, and those that may have ended before it."""
        seen = {other.rank: self._ended_at.get(other.rank) for other in self.departures if other.how is How.LOST}
        return [rank] if seen.get(rank) is None else [other for other, at in seen.items() if at == seen[rank]]

    def leave_lost(self, ended: Sequence[int], waiting: str = "") -> PeerLost:
        """Leave, and return the error, once ranks have :meth:`ended` and their connections have not broken."""
        self.posted.read()
        departure = self._to_name(ended, waiting=waiting)
        silence = None if departure or waiting else self.silence(f"{self.name(ended)} has waited too, and has ended")
        return silence or self._leave_departed(departure or Departure(ended[0], How.LOST), waiting=waiting)

    def last(self, ranks: Sequence[int] = ()) -> str:
        """The last step that missing ranks have come to: all have come to the one before this rank's."""
        if self.step:
            return f"{'their' if len(ranks) > 1 else 'its'} last step is {self.step - 1}"
        return f"{'they have' if len(ranks) > 1 else 'it has'} taken no step"

    @property
    def where(self) -> str:
        """Return what this rank is in, for messages."""
        return f"{self._within}step {self.step}"

    def advice(self, ranks: Sequence[int]) -> str:
        """Return what to do about ranks that are stopped, once this one has left because of them."""
        them = "them" if len(ranks) > 1 else "it"
        return (
            f"restart all ranks from the last checkpoint (kill -CONT lets {them} end), or wait longer with "
            "checks=Checks(hang_timeout=...)"
        )

    def alone(self, missing: Sequence[int]) -> str:
        """Return what this rank has called, and the missing ranks have not, unless all have."""
        if self._together:
            return f"all ranks called {self.call}"
        others = " and ".join(f"rank {rank}" for rank in missing)
        return f"rank {self._rank} called {self.call}, {others} did not, of this optimizer"

    def hung(self, ranks: Sequence[int], seconds: float, waiting: str = "") -> PeerSilent | None:
        """The error, once these have been stopped for so long. ``waiting``: what waits, if not a step."""
        if seconds < self._hang_timeout_s:
            return None
        since = f"been stopped for {seconds:.0f} s"
        if waiting:  # what waits can be repeated, so the other ranks need not know
            self.departures.unanswering.update(ranks)
            return PeerSilent(f"{self.name(ranks)} {have(ranks)} {since} while {waiting}; {go_on(ranks)}")
        return self._leave_stopped(ranks, since)

    def _leave_stopped(self, ranks: Sequence[int], since: str = "been stopped") -> PeerSilent:
        """Leave, and return the error about ranks that are stopped, as a rank of their host has seen."""
        waits = f"while {self.where} waits for {'them' if len(ranks) > 1 else 'it'}, and {self.last(ranks)}"
        text = f"{self.name(ranks)} {have(ranks)} {since} {waits}; {self.advice(ranks)}"
        return self.leave_silent(ranks, text, How.STOPPED)

    def _explain_error(self, error: RuntimeError, waited: float) -> PeerLost | None:
        """What the backend's error means, if more than it says can be told."""
        text = first_line(error)
        # An exchange on another thread may know to which rank the connection has broken, and says so after a wait.
        patience_s = 0.0 if timed_out(text) else min(self._told_s + ANNOUNCED_S, self._timeout_s)
        if known := self.explain(text, self._entered, patience_s) or self.silence(text, waited):
            return known
        late = timed_out(text) or closed_by_timeout(text)
        if not (missing := self.missing(waited)) or (is_loss(error) and not late):
            return self._lost_unknown(text, missing) if is_loss(error) else None
        return self._not_come(missing, waited, text)

    def silence(self, text: str, waited: float = 0.0) -> PeerSilent | None:
        """Return the error where a rank has given up waiting for others, or for this one; ``None`` if none has."""
        if not (silent := self.departures.silent):
            return None
        if not (missing := self.missing(waited)) and self._rank in silent:  # else name those
            return self._leave(f"the other ranks have given up waiting for this one, before {self.where}{aside(text)}")
        stopped = sorted(self.departures.stopped - {self._rank})
        return self._leave_stopped(stopped) if stopped else self._not_come(missing or silent, waited, text)

    def _not_come(self, missing: Sequence[int], waited: float, text: str) -> PeerSilent:
        """Leave, and return the error about ranks that have not come to this rank's call."""
        does, in_s = "they do" if len(missing) > 1 else "it does", f" in {waited:.1f} s" * (waited >= _SAID_S)
        does += " (py-spy dump)"
        if not set(missing) <= self._near.keys():  # of another host nothing else is known
            does += ", and whether a process has ended of which a forked child keeps the connections open"
        in_call = self._together and bool(self._within) == (self.call not in _IN_STEPS)
        what = f"not {'gone on in' if in_call else 'come to'} {self.where}{in_s}"
        return self.leave_silent(
            missing,
            f"{self.name(missing)} {have(missing)} {what}, and "
            f"{self.last(missing)}: {self.alone(missing)}; look at what {does}, and whether all ranks step several "
            f"optimizers in one order (as Join lists all), or wait longer with {self.timeout_option}{aside(text)}",
        )

    def _lost_unknown(self, text: str, missing: Sequence[int]) -> PeerLost:
        """Leave, and return the error where the call has broken; ``missing``: ranks that are known not to have come."""
        ranks = missing or [rank for rank in self._others if rank not in self._near] or self._others
        # If it has timed out, the connection that keeps it from ending may not have broken yet.
        known = self.explain(text, self._entered, self._news_s) if timed_out(text) else None
        known = known or (self._apart(ranks[0], text) if len(ranks) == 1 and not ended_at_peer(text) else None)
        if known is not None:
            return known
        self.departures.lost_one = True
        error = PeerLost(
            f"{'one of ' * (len(ranks) > 1)}{self.name(ranks)} has ended, or its host does not answer, or the network "
            f"drops packets, while {self.where} waits for it; look at the ranks' logs, and restart all from the last "
            f"checkpoint ({text})"
        )
        self._leave(str(error))
        return error

    def leave_silent(self, ranks: Sequence[int], text: str, how: How = How.SILENT) -> PeerSilent:
        """Leave, tell the others that this rank has given up waiting for these, and return the error."""
        for rank in ranks:
            self.departures.notice(Departure(rank, how))
        return self._leave(text)

    def message_failed(self, rank: int, text: str) -> PeerLost | None:
        """Leave, and return the error, once a message to or from a rank has failed, with the backend's ``text``."""
        ended = rank not in self._near and ended_at_peer(text)
        patience_s = 0.0 if timed_out(text) else self._told_s if ended else self._news_s
        if known := self.explain(text, _ANY_CALL, patience_s) or self.silence(text):
            return known
        if timed_out(text):
            return self.leave_silent(
                [rank],
                f"{self.name([rank])} has not come to the same exchange of step {self.step}; look at what it does "
                f"(py-spy dump), or wait longer with checks=Checks(timeout=...) ({text})",
            )
        return self._apart(rank, text, How.LOST if ended else How.CUT_OFF)

    def _apart(self, rank: int, text: str, how: How = How.CUT_OFF) -> PeerLost | None:
        """Leave, and return the error once a rank and this one cannot reach each other, if the others can be told."""
        if not self.departures.news:
            return None
        self.departures.notice(apart := Departure(rank, how, from_rank=self._rank))
        return self._leave_departed(apart, text)

    def warn(self, after_s: float) -> None:
        """Say, once per step, that an exchange has waited for so many seconds."""
        if self._warned != self.step:
            self._warned = self.step
            who = "another rank" if self.awaited is None else self.name([self.awaited])
            log.warning("an exchange of step %d has waited %d s for %s", self.step, after_s, who)

    def _leave(self, text: str) -> PeerSilent:
        """Leave training, and return the error: what this rank waited for may still come, and answer a later call."""
        self._given_up = PeerSilent(text)
        self.departures.leave()
        return self._given_up

    def leave_broken(self, rank: int, text: str, ask: Callable[[], None] | None) -> None:
        """Leave, and tell the others of a rank whose connection has broken without an announcement.

        Args:
            text: the backend's words. ask: asks that rank by way of others whether it lives, if there are others.
        """
        self.posted.read()
        if not self.departures.serves(rank) or self._rank in self.departures.silent:  # the others have gone on
            self.departures.leave()
            return
        closes_s = _CLOSING_S if network_failed(text) else _ENDING_S
        alive = (process := self._near.get(rank)) is not None and not until(process.has_ended, closes_s)
        silent = rank not in self._near and not closed_by_peer(text)
        self.doubt(rank)
        alive |= silent and ask is not None and self._says_alive(rank, ask)
        trained = not self.departures.knows(rank)
        self.departures.notice(Departure(rank, How.CUT_OFF if alive else How.LOST, from_rank=self._rank))
        if trained:  # else it has left training already, and the others may go on in the step that it has taken
            self.departures.leave()

    def doubt(self, rank: int) -> None:
        """Wait longer for news, as one rank asks whether another lives; if it is this one, say so."""
        self._doubted = time.monotonic()
        if rank == self._rank:
            self._ask(lambda: self._store.set(f"lives/{rank}", ""))

    def _says_alive(self, rank: int, ask: Callable[[], None]) -> bool:
        """Return whether a rank says, within seconds of being asked, that it lives."""
        key = f"lives/{rank}"
        with contextlib.suppress(RuntimeError):  # the rank to ask by has ended too
            ask()
        return until(lambda: bool(self._ask(lambda: self._store.check([key]))), _ALIVE_S)

    def require_going_on(self) -> None:
        """Raise PeerSilent once this rank has given up waiting for another."""
        if self._given_up is not None:
            raise PeerSilent(f"this rank has left training, because {self._given_up}")

    def explain(
        self, text: str, call: int | None = None, patience_s: float | None = None, waiting: str = ""
    ) -> PeerLost | None:
        """Return the error that names the rank that has left, once a connection has broken; ``None`` if unknown.

        Args:
            text: the backend's words. call: see :meth:`Departures.first`. patience_s: how long to wait for news;
                ``None`` is as long as news may take. waiting: what waits, if not a step.
        """
        if self._given_up is not None:  # by another wait of this call, since no later one begins
            return PeerSilent(str(self._given_up))
        begun, patience_s = time.monotonic(), self._news_s if patience_s is None else patience_s
        ask_at = 0.0
        while True:
            ended = self.ended(waiting)  # a rank that has ended because of another has put that into the store before
            self.posted.read()
            waited, departure = time.monotonic() - begun, self._to_name(ended, call, waiting)
            in_order = departure is not None and departure.how in (How.CLOSED, How.ENDED, How.GAVE_UP)
            if in_order and not waiting and self.departures.silent:  # because of which that rank has left
                return self.silence(text, waited)
            # A rank that has failed may have done so because of another one, of which news may still arrive.
            if departure is not None and (not departure.how.ends_unserved or waited >= min(patience_s, _CLOSING_S)):
                return self._leave_departed(departure, text, waiting)
            more = self.departures.news and not self.departures.unannounced
            answered = not more or time.monotonic() - self._doubted >= self._doubt_s
            if answered and waited >= (patience_s if more else min(patience_s, _CLOSING_S)):
                return self._stopped_error() if call is None and timed_out(text) else None
            if waited >= ask_at:  # soon and often, before others end because of it
                ask_at = 2 * waited
                self._notice_gone(text)
            time.sleep(0.01)

    def _notice_gone(self, text: str) -> None:
        """Notice the rank that is lost, once a connection has broken, where no ring tells of it.

        Args:
            text: the backend's words.
        """
        if not text or timed_out(text) or self.departures.news or len(gone := self.gone()) != 1:
            return
        self.posted.read()  # a rank that has ended because of another has put that into the store before
        if not self.departures.silent and next(iter(self.departures), None) is None:
            self.departures.notice(Departure(gone[0], How.LOST))

    def _stopped_error(self) -> PeerSilent | None:
        """Return the error about ranks of this host that are stopped, once a wait for some rank has timed out."""
        are = "are" if len(stopped := self.stopped()) > 1 else "is"
        return PeerSilent(f"{self.name(stopped)} {are} stopped; {go_on(stopped)}") if stopped else None

    def _leave_departed(self, departure: Departure, text: str = "", waiting: str = "") -> PeerLost:
        """Leave, and return the error about a rank that has left."""
        self.departures.say_untold()
        self.departures.leave()
        unannounced, ranks = departure.how in (How.LOST, How.CUT_OFF), [departure.rank]
        if departure.how is How.CUT_OFF:
            ranks = sorted([departure.rank, departure.from_rank])
        elif departure.how is How.LOST:
            ranks = self._ended_with(departure.rank)
        how, them = f"{have(ranks)} ended", "them" if len(ranks) > 1 else "it"
        how += "" if departure.rank in self._near else ", or its host does not answer,"
        waits = f"{how} while {waiting or f'{self.where} waits for {them}'}, and {self.last(ranks)}"
        name = self.name(ranks) if unannounced else self.name.of(departure.rank)
        return PeerLost(departure.text(name, waits) + aside(text) * unannounced)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """What the store answers, ``None`` if it does not in time."""
        asked = None
        with contextlib.suppress(RuntimeError):  # this process can get no thread
            asked = None if self._thread.ended else self._thread.submit(call)
        if asked is None or not asked.wait(_STORE_S):
            self._thread.leave()  # a store that is gone keeps no process from ending
            return None
        return None if isinstance(asked.exception(0), RuntimeError) else asked.result(0)

    def close(self) -> None:
        """Ask the store nothing more."""
        self._thread.close()
