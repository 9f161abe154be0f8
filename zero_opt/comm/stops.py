"""What is looked at in a wait for other ranks: which of them are stopped, or have ended."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ..system.log import log
from .departures import How

if TYPE_CHECKING:
    from .peer_watch import Watch

# Seconds after which a wait for another rank is mentioned in the log.
WARN_AFTER_S = 30.0
# How often the processes of this host are looked at, if they are no more than so many; more of them, less often.
LOOK_AGAIN_S, _LOOKED_AT = 0.5, 16
# How long the announcement of a process that has ended may take, where another process holds its connections open.
ANNOUNCED_S = 1.0


class Stops:
    """How long ranks of this host have been stopped, or have ended unannounced, while one waits: the connections of a
    rank that was killed stay open as long as a process that it has forked lives."""

    def __init__(self, watch: Watch, waiting: str = "", only: int | None = None) -> None:
        """``waiting``: see :meth:`Watch.hung`. ``only``: the rank that is waited for, if not all are."""
        self._watch, self._waiting, self._only = watch, waiting, only
        self._begun = self._looked = time.monotonic()
        self._apart_s = LOOK_AGAIN_S * max(1.0, len(watch._near) / _LOOKED_AT)
        self._since: dict[int, float] = {}

    def attend(self) -> None:
        """Do as :meth:`look`, and mention in the log an exchange for which the main thread waits long."""
        waited, thread = time.monotonic() - self._begun, threading.current_thread()
        if waited > WARN_AFTER_S and thread is threading.main_thread():
            self._watch.warn(WARN_AFTER_S)
        self._watch.say_awaiting(waited)
        departure = self._watch.departures.of(self._watch.awaited)  # see [Note: connecting on first use]
        if departure is not None and (departure.how.ends_unserved or departure.how is How.INTERRUPTED):
            raise self._watch._leave_departed(departure)
        self.look()

    def look(self) -> None:
        """Raise PeerSilent if a rank has been stopped too long, PeerLost if one is lost; to be called repeatedly."""
        now = time.monotonic()
        if now - self._looked < self._apart_s:
            return
        self._looked = now
        if now - self._begun > self._watch.mark_after_s:
            self._watch.posted.read(now - self._begun)
        if self._waiting and (lost := self._watch.departures.lost_to(self._only)) is not None:
            raise self._watch._leave_departed(self._watch.departures.first_gone() or lost, waiting=self._waiting)
        if not self._waiting and (silence := self._watch.silence("", now - self._begun)) is not None:
            raise silence
        ended = self._watch.ended(self._waiting)
        if ended and now - self._watch._ended_at[ended[0]] >= ANNOUNCED_S:
            raise self._watch.leave_lost(ended, self._waiting)
        stopped = [rank for rank in self._watch.stopped() if self._only in (None, rank)]
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        longest = now - min(self._since.values(), default=now)
        if (error := self._watch.hung(stopped, longest, self._waiting)) is not None:
            raise error


class Wait(Stops):
    """One wait for all ranks."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(watch)
        self._marked = self._warned = False

    @property
    def waited(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begun

    def look(self) -> None:
        """Do what is due after a slice: mark this rank, warn, and look as :class:`Stops` does."""
        watch = self._watch
        if not self._marked and self.waited > watch.mark_after_s:
            self._marked = True
            watch.mark()
        if not self._warned and self.waited > WARN_AFTER_S:
            self._warned = True
            missing = watch.missing()
            who, last = watch.name(missing) or "another rank", watch.last(missing)
            last += f": {watch.alone(missing)}; do all step several optimizers in one order?" if missing else ""
            log.warning("%s has waited %d s for %s; %s", watch.where, WARN_AFTER_S, who, last)
        super().look()
