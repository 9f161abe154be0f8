"""Messages between two ranks about state; see the notes of the state service.

Every message is a few int64 numbers, except listings and the elements themselves.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..comm.backend_errors import timed_out
from ..comm.departures import Departures, How, go_on
from ..comm.groups import tensor_bytes
from ..comm.peer_watch import Watch
from ..comm.ring import FAREWELL_S, FOR_EVER_S, RING_TAG, words_of
from ..comm.stops import WARN_AFTER_S
from ..comm.transfers import Transfer
from ..errors import PeerLost, PeerSilent, StepDesync
from ..system.future import Future
from ..system.log import log
from .guard import Verdict

if TYPE_CHECKING:
    from ..comm.side_group import SideGroup
    from .consolidate import FrozenState, LocalState

# What the asking rank sends once it has all answers, followed by the number of its pull.
GO, STOP = 0, 1
# Codes of answers besides those of Verdict: another answer follows; an error follows in place of the listing.
LATER, ERROR = 3, 4
# Seconds that the other side of a bounded wait has on top.
MARGIN_S = 30.0
# Pulls of one rank until a tag is used again. Messages of a pull that was given up may still wait under that tag, so
# every message carries the number of its pull.
_PULL_TAGS = 1 << 20


class Answer(NamedTuple):
    """An answer to the asking rank.

    Attributes:
        code: a Verdict's value, ``LATER`` or ``ERROR``. step: the answering rank's. nbytes: size of the listing, or of
            the error, that follows. pull: number of the request that is answered.
    """

    code: int
    step: int
    nbytes: int
    pull: int

    def require_ready(self, rank: int, mine: int) -> None:
        """Raise an error unless the answering rank has the state of the asking one's step, ``mine``."""
        if self.code == Verdict.AHEAD.value:
            raise StepDesync(
                f"state_dict() in step {mine} of this rank, but rank {rank}, in step {self.step}, changes its state or "
                "has changed it since, by step(), a load or a new param group; call it between steps"
            )
        if self.code == Verdict.BEHIND.value:
            raise PeerLost(
                f"state_dict() in step {mine} of this rank, but rank {rank} has stayed in step {self.step}; let every "
                "rank take this step, or give them longer with checks=Checks(timeout=...)"
            )


def answer_tag(pull: int) -> int:
    """Return the tag of what an asked rank sends; what the asking rank sends has the next tag."""
    return RING_TAG + 1 + 2 * (pull % _PULL_TAGS)


class DirectMessages:
    """Messages between this rank and another, beside the ring. It does not wait for those that it sends."""

    def __init__(self, side: SideGroup, departures: Departures) -> None:
        self._side, self._departures = side, departures
        self._sent: deque[tuple[Transfer, Tensor]] = deque(maxlen=4 * side.world_size)

    def send(self, dst: int, tag: int, *numbers: int) -> None:
        """Begin to send numbers."""
        words = words_of(*numbers)
        self._sent.append((self._side.send_to(words, dst, tag), words))

    def receive(self, into: Tensor, src: int, tag: int, seconds: float = FOR_EVER_S) -> Tensor:
        """Wait for a message, and return what it has filled. A message of no bytes is never sent."""
        if into.numel():
            self._side.receive_from(into, src, tag).wait(seconds)
            self._departures.unanswering.discard(src)
        return into

    def receive_bytes(self, nbytes: int, src: int, tag: int) -> bytes:
        """Wait for a message of so many bytes."""
        return tensor_bytes(self.receive(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), src, tag))

    def forget(self) -> None:
        """Drop what was sent, which keeps the connections open."""
        self._sent.clear()


class Pull:
    """A request of this rank for the others' state, whose caller may leave it. Two threads use it at the same time.

    Attributes:
        number: differs from those of other requests. step: this rank's. heard: the step, where it is known, of each
            rank that has not sent its listing. waiting: the ranks that wait for this one to say "go" or "stop"; the
            thread that removes a rank says so. left: is over once the caller has left, or has all.
    """

    def __init__(self, number: int, step: int, ranks: Sequence[int]) -> None:
        self.number, self.tag, self.step = number, answer_tag(number), step
        self.heard: dict[int, int | None] = dict.fromkeys(ranks)
        self.waiting = set[int]()
        self.left = Future[None]()

    def stop(self, send: Callable[..., None]) -> None:
        """Tell the ranks that have not been told to go to stop; ``send`` takes a rank, a tag and numbers."""
        with contextlib.suppress(KeyError):  # there are none left
            while True:
                send(self.waiting.pop(), self.tag + 1, STOP, self.number)

    def warn(self) -> None:
        """Name, in the log, the ranks that have not sent their listings in time; waits until then."""
        if self.left.wait(WARN_AFTER_S):
            return
        ranks = ", ".join(
            f"rank {rank}" + ("" if step is None else f" (in step {step})")
            for rank, step in sorted(self.heard.copy().items())
        )
        if ranks:
            log.warning("state_dict() in step %d has waited %d s for %s", self.step, WARN_AFTER_S, ranks)


class Awaited:
    """The rank whose message is awaited, and until when. Two threads use it at the same time.

    gloo's wait goes on, without end: one that times out breaks all connections.
    """

    def __init__(self) -> None:
        self._rank, self._patience_s, self._due = -1, math.inf, math.inf

    def message_of(self, rank: int, patience_s: float) -> None:
        """Note that the next message must come from this rank, within so many seconds."""
        self._patience_s = patience_s
        self._renew()
        self._rank = rank

    def arrives(self, arrived: Callable[[], None]) -> None:
        """Take in a part of the message, by ``arrived``; the next one must come within as many seconds."""
        arrived()
        self._renew()

    def lookout(self, look: Callable[[], None], watch: Watch) -> Callable[[], None]:
        """Return a function that does as ``look``, and raises PeerSilent once the message is late, from now on."""
        self._renew()  # it may be one that an earlier caller has given up

        def look_on() -> None:
            look()
            if time.monotonic() > self._due:
                raise unanswered(watch, self._rank, self._patience_s)

        return look_on

    def _renew(self) -> None:
        self._due = time.monotonic() + self._patience_s


@contextlib.contextmanager
def broken_if_left(side: SideGroup) -> Iterator[None]:
    """Break the connections if an exception ends the context, unless they are lost, of which the ring tells."""
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, PeerLost) and isinstance(error.__cause__, RuntimeError)):
            side.interrupt()
        raise


def explained(watch: Watch, words: str, patience_s: float | None = None) -> PeerLost | None:
    """Return the error that names the rank that has left while one asks for state; see :meth:`Watch.explain`.

    Args:
        patience_s: ``None`` is as long as news may take of why a connection has broken, which no other wait brings.
    """
    if patience_s is None and timed_out(words):
        patience_s = FAREWELL_S
    return watch.explain(words, patience_s=patience_s, waiting=f"state_dict() before {watch.where} waits for it")


def broken(watch: Watch, words: str) -> PeerLost:
    """Return the error about connections that have broken, given the backend's words, where no rank is lost."""
    left = next((other for other in watch.departures if other.how.serves), None)
    if left is not None:
        return PeerLost(
            f"{left.became(watch.name([left.rank]))}, and gives its state to others no more ({words}): call "
            "opt.state_dict() before any rank closes, or restart all ranks from a checkpoint"
        )
    return PeerLost(
        f"the ranks' connections for state_dict() have broken ({words}): call opt.consolidate_state_dict(to=rank) on "
        "every rank before opt.state_dict(), or restart all ranks from a checkpoint"
    )


def unanswered(watch: Watch, rank: int, seconds: float) -> PeerLost:
    """Return the error about a rank that has not answered in so many seconds; it may answer later."""
    watch.departures.unanswering.add(rank)
    return explained(watch, "Timed out", 0.0) or PeerSilent(
        f"{watch.name([rank])} has not answered in {seconds:.0f} s while state_dict() before {watch.where} waits for "
        f"it: it is stopped or has ended, or its host does not answer; {go_on([rank])}"
    )


def require_not_lost(watch: Watch) -> None:
    """Raise PeerLost if a rank is known to be lost or cut off: to connect to it would take minutes."""
    lost = any(other.how in (How.LOST, How.CUT_OFF) for other in watch.departures)
    known = explained(watch, "", 0.0) if lost else None
    if known is not None:
        raise known


class Offer(NamedTuple):
    """The state that an asking rank was offered.

    Attributes:
        state: ``None`` where its listing, which is under way, is an error.
    """

    dst: int
    pull: int
    state: LocalState | FrozenState | None
    listing: Tensor
    sending: Transfer
