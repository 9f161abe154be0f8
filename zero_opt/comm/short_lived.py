"""Connections of all ranks for one call outside of training, with waits that end as those of training do.

[Note: no ring]
Here ranks pass on no news of departures, unlike in [Note: the ring]. A rank whose connections break leaves, which
breaks those of the others. First it writes to the store that it leaves, and to which ranks it has lost its connections.
A rank that others name there, and that has written nothing, is lost. Two ranks that name each other cannot reach each
other. If no rank names another, the only rank that has written nothing is taken for lost.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from ..errors import PeerLost, PeerSilent, ZeroOptError
from ..field_checks import waited_for
from ..policies import Checks
from .backend_errors import closed_by_timeout, first_line, timed_out
from .connecting import Connecting, made_by_all
from .departures import Departure, How
from .device_backends import group_timeout_s
from .groups import Group
from .keepalive import HostLimits
from .peer_watch import Watch
from .rendezvous import Patience, ended_by

# Seconds that ranks have to say why they leave.
_SAYING_S = 5.0
# Connections are tried so many seconds apart in a wait, or such a part of it.
_TRY_AGAIN_S, _TRY_AGAIN_PART = 2.0, 0.25


class NamedCallsWatch(Watch):
    """A watch of calls outside of steps: messages name the call in place of a step."""

    @property
    def where(self) -> str:
        return self.call

    def alone(self, missing: Sequence[int]) -> str:
        others = " and ".join(f"rank {rank}" for rank in missing)
        return f"rank {self._rank} waits in {self.call} for {others}"


class CallWatch(NamedCallsWatch):
    """A watch of one call outside of training."""

    timeout_option = "init_process_group(timeout=...)"
    broken_connections: Callable[[], Iterable[tuple[int, str]]] = tuple  # see Group.broken_connections()
    _why = ""  # what the others are told of an exception here
    _tried_at = 0.0  # seconds of a wait after which connections were tried

    def last(self, ranks: Sequence[int] = ()) -> str:  # noqa: ARG002  (as for steps)
        return "all ranks have begun that call"

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
        if not 0 <= waited - self._tried_at < apart:
            self._tried_at = waited
            for _, words in self._lost_connections():
                self.overdue, error = True, RuntimeError(words)  # gloo's own wait may go on
                raise self._explain_error(error, waited) or error from error
        return super().silence(text, waited)

    def interrupted(self, error: BaseException, what: str = "") -> None:
        self._why = ended_by(error, self.name([self._rank]), self.call)
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
        self._say("", [rank for rank, _ in self._lost_connections()])
        self.departures.leave()
        return self._silent_of_all(text)

    def _lost_connections(self) -> Iterator[tuple[int, str]]:
        """Yield the ranks to which the connection has ended, but not since this rank has waited too long."""
        return ((rank, words) for rank, words in self.broken_connections() if not closed_by_timeout(words))

    def _say(self, why: str, lost: Sequence[int] = ()) -> None:
        """Tell the others why this rank leaves; "" is that connections have broken.

        Args:
            lost: the ranks to which this one has lost its connection.
        """
        self._ask(lambda: self._store.set(f"left/{self._rank}", json.dumps([why, lost])))

    def _silent_of_all(self, text: str) -> PeerLost:
        """Return the error of a rank that knows why it leaves, else that about the ranks that are lost.

        One that is stopped on this host says nothing either, but breaks no connection.
        """
        end = time.monotonic() + _SAYING_S
        while True:
            self.posted.read()
            if (departure := self.departures.first(None)) is not None:  # another rank has found it
                return self._leave_departed(departure, text)
            said: dict[int, tuple[str, list[int]]] = self._ask(self._said) or {}
            why = next(filter(None, (why for why, _ in said.values())), None)
            if why is not None:
                return PeerSilent(why)
            stopped, is_final = self.stopped(), time.monotonic() > end
            absent = [rank for rank in self._others if rank not in said and rank not in stopped]
            departure = _found_out({rank: lost for rank, (_, lost) in said.items()}, absent, is_final=is_final)
            if departure is not None:
                if departure.from_rank in (-1, self._rank):  # a rank says of itself from which one it is cut off
                    self.departures.notice(departure)
                return self._leave_departed(departure, text)
            if is_final or not absent:
                unheard = [rank for rank in absent if rank not in self._near]  # those of this host live
                return self._stopped_error() or self._lost_unknown(text, unheard)
            time.sleep(0.01)

    def _said(self) -> dict[int, tuple[str, list[int]]]:
        """Return what ranks have said, this one first."""
        keys = {rank: f"left/{rank}" for rank in (self._rank, *self._others)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}


def _found_out(lost: Mapping[int, Collection[int]], absent: Sequence[int], *, is_final: bool) -> Departure | None:
    """Return what has become of a rank, as far as is known; see [Note: no ring].

    Args:
        lost: by rank that has left, this one first, the ranks to which it had lost its connection.
        absent: the ranks that have written nothing. is_final: whether no rank will write more.
    """
    for rank, others in lost.items():
        for other in others:
            if rank in lost.get(other, ()):
                return Departure(other, How.CUT_OFF, from_rank=rank)
    told = any(lost.values())
    gone = [rank for rank in absent if not told or any(rank in others for others in lost.values())]
    return Departure(gone[0], How.LOST) if len(gone) == 1 and (is_final or len(absent) == 1) else None


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
        connecting.watch.broken_connections = group.broken_connections
        try:
            yield group
            group.all_gather_bytes(b"", call)  # nobody closes connections that others still need
        except BaseException as error:
            if not isinstance(error, ZeroOptError):  # between two waits
                connecting.watch.interrupted(error)
            raise
