"""Connections of all ranks for one call outside of training, with waits that end as those of training do.

Nobody passes news of departures on here, as [Note: the ring] has it. So ranks whose connections break leave, which
breaks those of the others, and each says so in the store: the rank that does not is the one that was lost.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from ..errors import PeerLost, PeerSilent, ZeroOptError
from ..field_checks import waited_for
from ..policies import Checks
from ..system.interrupts import by_handler
from .backend_errors import first_line, timed_out
from .connecting import Connecting, made_by_all
from .departures import Departure, How
from .device_backends import group_timeout_s
from .groups import Group
from .keepalive import HostLimits
from .peer_watch import Watch
from .rendezvous import AGAIN, Patience, ended_by

# Seconds that ranks have to say why they leave.
_SAYING_S = 5.0
# Connections are tried so many seconds apart in a wait, or such a part of it.
_TRY_AGAIN_S, _TRY_AGAIN_PART = 2.0, 0.25


class CallWatch(Watch):
    """A watch of one call outside of training."""

    timeout_option = "init_process_group(timeout=...)"
    once_ended = AGAIN  # what to do where an exception has ended the call
    require_connected: Callable[[], None] | None = None  # raises RuntimeError if a connection has ended
    _why = ""  # what the others are told of an exception here
    _tried_at = 0.0  # seconds of a wait after which connections were tried

    @property
    def where(self) -> str:
        return self.call

    def last(self, ranks: Sequence[int] = ()) -> str:  # noqa: ARG002  (as for steps)
        return "all ranks have begun that call"

    def alone(self, missing: Sequence[int]) -> str:
        others = " and ".join(f"rank {rank}" for rank in missing)
        return f"rank {self._rank} waits in {self.call} for {others}"

    def advice(self, ranks: Sequence[int]) -> str:
        return f"let {'them' if len(ranks) > 1 else 'it'} go on (kill -CONT), and call {self.call} again on every rank"

    def missing(self, waited: float = math.inf) -> list[int]:
        """Return the ranks that have entered the fewest collectives: a source may be done while receivers wait."""
        marked = self._marked() if waited > self.mark_after_s else {}
        return [rank for rank, entered in marked.items() if entered == min(marked.values()) < self._entered]

    def silence(self, text: str, waited: float = 0.0) -> PeerSilent | None:
        """See :class:`Watch`. Raises PeerLost where a connection has ended, whatever waits; see [Note: half a message].

        What is received to try one stays posted, so waits are tried further and further apart.
        """
        apart = max(_TRY_AGAIN_S, _TRY_AGAIN_PART * waited)
        if self.require_connected is not None and not 0 <= waited - self._tried_at < apart:
            self._tried_at = waited
            try:
                self.require_connected()
            except RuntimeError as error:
                if by_handler(error):
                    raise
                self.overdue = True  # gloo's own wait may go on
                raise self._explain_error(error, waited) or error from error
        return super().silence(text, waited)

    def interrupted(self, error: BaseException, what: str = "") -> None:
        self._why = ended_by(error, self.name([self._rank]), self.call, self.once_ended)
        super().interrupted(error, what)

    def _leave(self, text: str) -> PeerSilent:
        if self._given_up is None:
            self._say(self._why or text)
        return super()._leave(text)

    def _explain_error(self, error: RuntimeError, waited: float) -> PeerLost | None:
        text = first_line(error)
        if timed_out(text):
            return super()._explain_error(error, waited)
        self.posted.end_ring()  # what others have noticed is in the store, for which one that ends may not wait
        known = self.explain(text, self._entered)
        if known is not None:
            return known
        self.departures.leave()
        self._say("")
        return self._silent_of_all(text)

    def broken(self, error: RuntimeError) -> PeerLost | None:
        """Leave, and return the error once a collective of all ranks has failed that this watch has not begun."""
        stopped = self.stopped() if timed_out(first_line(error)) else []
        return self._leave_stopped(stopped) if stopped else self._explain_error(error, 0.0)

    def _say(self, why: str) -> None:
        """Tell the others why this rank leaves; "" is that a connection has broken."""
        self._ask(lambda: self._store.set(f"left/{self._rank}", json.dumps(why)))

    def _silent_of_all(self, text: str) -> PeerLost | None:
        """Return the error of a rank that knows why it leaves, else that about the one that does not say so.

        One that is stopped on this host says nothing either, but breaks no connection.
        """
        end = time.monotonic() + _SAYING_S
        while True:
            self.posted.read()
            if (departure := self.departures.first(None)) is not None:  # a rank of its host has seen it
                return self._leave_departed(departure, text)
            said: dict[int, str] = self._ask(self._said) or {}
            why = next(filter(None, said.values()), None)
            if why is not None:
                return PeerSilent(why)
            absent = [rank for rank in self._others if rank not in said]
            if len(absent) < 2 or time.monotonic() > end:
                gone = [rank for rank in absent if rank not in self.stopped()]
                lost = self._leave_departed(Departure(gone[0], How.LOST), text) if len(gone) == 1 else None
                return lost or (None if gone else self._stopped_error())
            time.sleep(0.01)

    def _said(self) -> dict[int, str]:
        """What other ranks have said, by rank."""
        keys = {rank: f"left/{rank}" for rank in self._others if self._store.check([f"left/{rank}"])}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}


@contextmanager
def short_lived_group(parent: dist.ProcessGroup, call: str) -> Iterator[Group]:
    """A context that has a group of the parent's ranks, which are processes, for tensors in host memory. Collective.

    Args:
        call: what the user has called, for messages.

    Raises:
        PeerLost, PeerSilent: a rank does not come, is lost, stopped or silent. OutOfResources, ProcessGroupError: no
            connections; all of them on every rank. The parent can be used as before.
    """
    timeout_s = waited_for(group_timeout_s(parent))
    limits = HostLimits(timeout_s=timeout_s)
    patience = Patience(timeout_s, timeout_s, Checks().hang_timeout, limits, call, "call it", CallWatch, compared=False)
    with ExitStack() as last_first:
        last_first.callback(limits.lift)
        connecting = Connecting(parent, 1, patience)
        with made_by_all(connecting) as made:
            group = Group(parent, None, "call", connecting)
            made.append(group)
        last_first.callback(group.close)
        last_first.callback(connecting.watch.departures.forget)
        limits.hold()
        group.watch, connecting.watch.call = connecting.watch, call
        connecting.watch.posted.begin_ring()
        connecting.watch.departures.leave = group.disconnect
        assert isinstance(connecting.watch, CallWatch), "what patience makes"
        connecting.watch.require_connected = group.require_connected
        try:
            yield group
            group.all_gather_bytes(b"", call)  # nobody closes connections that others still need
        except BaseException as error:
            if not isinstance(error, ZeroOptError):  # between two waits
                connecting.watch.interrupted(error)
            raise
