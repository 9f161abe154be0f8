"""The ring: news of ranks that have left travels around it from rank to rank, without the store.

[Note: the ring]
A thread per rank waits for messages of the rank before it and passes each on to the next, until the message has been
everywhere. So one blocked receive per rank suffices, and nothing polls. The rank after one that dies notices that at
once, tells the others, and breaks its own connections in turn. A rank that leaves training announces that, and so does
a rank that breaks its connections for another reason. So if a connection breaks without an announcement, its rank is
dead, or its host is silent. In that case the rank after it asks round the ring whether it lives. One that lives says so
in the store, since the two cannot reach each other. A rank that is stopped passes nothing on; see :class:`Posted`.
(gloo's receive from any rank does not notice. A gloo wait that times out ends the group, so none can be cut short.)
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import PeerLost, ZeroOptError
from ..system.devices import thread_device
from ..system.failures import on_failure
from . import process_exit
from .backend_errors import backend_words, closed_by_timeout
from .departures import Departure, How
from .peer_watch import Watch
from .side_group import SideGroup
from .transfers import Message

# Kinds of messages round the ring: ASKED asks for state; BROKEN goes to the next rank alone.
ASKED, DEPARTED, BROKEN, DOUBTED = 0, 1, 2, 3
RING_TAG = 1
# Seconds that messages to the next rank have to arrive before connections are broken.
FAREWELL_S = 1.0
# Seconds that threads have to end once connections are broken.
INTERRUPTION_S = 5.0
# Seconds that a thread may wait for messages: a hundred years. gloo counts nanoseconds in 63 bits.
FOR_EVER_S = 100 * 365 * 86400.0


class RingMessage(NamedTuple):
    """A message from rank ``origin``, which asks for state, has heard that a rank has left, or doubts that one lives.

    Attributes:
        kind: ASKED, DEPARTED, BROKEN or DOUBTED. pull: number of the request. changes: commits after which the state is
            wanted. about: the rank that has left, or that is doubted. how, steps, calls: see :class:`Departure`.
    """

    kind: int
    origin: int
    pull: int = 0
    changes: int = 0
    about: int = 0
    how: int = 0
    steps: int = 0
    calls: int = 0


def words_of(*numbers: int) -> Tensor:
    """Return the integers as a tensor that can be sent."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def departed(origin: int, departure: Departure) -> Tensor:
    """Return the message of rank ``origin`` about a rank that has left."""
    return words_of(*RingMessage(DEPARTED, origin, 0, 0, *departure[:4]))


class Ring:
    """This rank's place in the ring, which has connections of its own. See the note of the module.

    Attributes:
        others: the other ranks, in the order round the ring. open: those that have not closed, as far as is known.
        closed: whether this rank has closed. lock: held while it closes, until it has told the others.
        lost: what has broken the ring here.
        told: whether a break of the ring is announced, by this rank or by the one before it.
        thread: waits for messages, once the ring has begun.
    """

    thread: threading.Thread
    closed = told = False
    lost: Exception | None = None

    def __init__(self, side: SideGroup, watch: Watch) -> None:
        """``watch``: that of training, which hears of ranks that have left."""
        self._side, self._watch, self._departures = side, watch, watch.departures
        self.others = [(side.rank + away) % side.world_size for away in range(1, side.world_size)]
        self._right, self._left = self.others[0], self.others[-1]
        self.open, self.lock = set(self.others), threading.RLock()
        # Sent without waiting, lest ranks wait for each other in a circle; each has three at most on the ring. Causes
        # come on top, at most two for each rank.
        self._passed: deque[tuple[Message, Tensor]] = deque(maxlen=8 * side.world_size)
        side.farewell = self._bid_farewell
        self._causes_told = set[tuple[int, How]]()
        self._departures.tell, self._departures.news = self.tell, True

    def begin(
        self, service: process_exit.Service, over: Callable[[], None], asked: Callable[[RingMessage], None]
    ) -> None:
        """Begin to listen, for a service that goes on when the process ends.

        Args:
            service: what :mod:`.process_exit` ends with the process. over: called on the ring's thread as its last act;
                it calls :meth:`drop`. asked: called there with a message that asks for state.
        """
        self.thread = threading.Thread(target=self._listen, args=(thread_device(), asked, over), name="zero_opt ring")
        process_exit.add(service)
        with on_failure(partial(process_exit.running.discard, service)):
            process_exit.threads.start(self.thread)

    def _listen(
        self, use_device: Callable[[], None], asked: Callable[[RingMessage], None], over: Callable[[], None]
    ) -> None:
        try:
            use_device()
            while self.open or self.told or not self.closed:
                words = words_of(*[0] * len(RingMessage._fields))
                self._side.receive_from(words, self._left, RING_TAG).wait(FOR_EVER_S)
                message = RingMessage(*words.tolist())
                if self._goes_on(message):
                    with contextlib.suppress(PeerLost):  # if the next rank is dead, the one after it notices
                        self.pass_on(words)
                self._take(message, asked)
            with self.lock:  # held by a rank that closes, until it has told the others
                pass
            self.wait_passed(INTERRUPTION_S)
        except (ZeroOptError, RuntimeError) as error:
            self.lost = error
            self._watch.posted.end_ring()
            self._find_lost()
            self._side.interrupt()
        finally:
            over()

    def _take(self, message: RingMessage, asked: Callable[[RingMessage], None]) -> None:
        if message.kind == BROKEN:
            self.told = True
            raise PeerLost("another rank has broken them")  # which a process that it has forked may keep open
        if message.kind == DOUBTED:
            self._watch.doubt(message.about)
        elif message.kind == DEPARTED:
            told = Departure(message.about, How(message.how), message.steps, message.calls)
            self._departures.hear(told.as_heard(self._side.rank, message.origin))
            if self._departures.has_lost(message.about):
                self._departures.leave()
            if told.how.ends_unserved or told.how in (How.CLOSED, How.ENDED):
                self.open.discard(message.about)
        else:
            asked(message)

    def pass_on(self, words: Tensor) -> None:
        """Begin to send a message to the next rank."""
        self._passed.append((self._side.send_to(words, self._right, RING_TAG), words))

    def wait_passed(self, seconds: float) -> None:
        """Wait until messages to the next rank have arrived."""
        with contextlib.suppress(IndexError):
            while True:
                self._passed.popleft()[0].wait_here(seconds)

    def _goes_on(self, message: RingMessage) -> bool:
        """Return whether a message is for the next rank too: not if that has sent it, or was told the same already."""
        if message.kind == BROKEN or message.origin == self._right:
            return False
        return message.kind != DEPARTED or self._is_news(message.about, How(message.how))

    def _is_news(self, rank: int, how: How) -> bool:
        """Return whether to tell the next rank of a departure. Of a cause this returns True once."""
        told = (rank, how) in self._causes_told
        if how.is_cause:
            self._causes_told.add((rank, how))
        return not told

    def _pass_causes(self) -> None:
        """Tell the next rank of causes, lest it hear that this rank has left before it reads why in the store."""
        for cause in self._departures.causes():
            if self._is_news(cause.rank, cause.how):
                self.pass_on(departed(self._side.rank if cause.from_rank < 0 else cause.from_rank, cause))

    def tell(self, departure: Departure) -> None:
        """Tell the other ranks of a departure, and end waits for a lost rank, whose connections may be open still."""
        self._side.courtesies.do(partial(self.pass_on, departed(self._side.rank, departure)))
        if departure.how is How.LOST:
            self._side.interrupt()

    def _find_lost(self) -> None:
        """Tell the others that the rank before this one is lost, if its connection broke without an announcement."""
        by_itself = closed_by_timeout(backend_words(self.lost))
        over = self.told or by_itself or (self.closed and not self.open)
        if not over and self._departures.serves(self._left):
            doubt = words_of(*RingMessage(DOUBTED, self._side.rank, about=self._left))
            ask = None if self._left == self._right else partial(self.pass_on, doubt)
            self._watch.leave_broken(self._left, str(self.lost), ask)

    def _bid_farewell(self) -> None:
        """Tell the next rank that this one is about to break its connections, and is not dead."""
        self.told, self._departures.news = True, False
        with contextlib.suppress(RuntimeError):
            self._pass_causes()  # a thread that tells of one may come too late
            self.pass_on(words_of(*RingMessage(BROKEN, self._side.rank)))
            self.wait_passed(FAREWELL_S)

    def drop(self) -> None:
        """Close the connections: no message comes any more."""
        self._passed = deque()  # messages keep the connections open, and so do frames that have had them
        error: BaseException | None = self.lost
        while error is not None:
            error.__traceback__, error = None, error.__cause__ or error.__context__
        self._side.close()

    def close(self, how: How, announce: Callable[[How], None]) -> bool:
        """Close this rank's place in the ring; return ``False`` if it was closed already, or in a forked child.

        Args:
            how: what becomes of this rank's optimizer or program. announce: tells the other ranks how this one leaves;
                called under the lock.
        """
        if self._side.inherited:  # where nothing runs, and locks may be held forever
            self._side.close()
            return False
        with self.lock:
            if self.closed:
                return False
            self.closed = True
            how = self._departures.announced(how)
            if self._departures.causes():
                self._side.courtesies.do(self._pass_causes)
            announce(how)
        if how.ends_unserved:
            self._departures.leave()
        elif how is not How.CLOSED:  # on close() the caller leaves, once what it has queued is sent
            self._departures.end()
        return True

    def break_off(self) -> None:
        """Break the connections, and wait a little for the thread."""
        self._side.interrupt()
        self.thread.join(INTERRUPTION_S)


class UnservedRing(Ring):
    """A ring in which no rank asks for state: it ends with the first rank that leaves it."""

    def __init__(self, side: SideGroup, watch: Watch) -> None:
        super().__init__(side, watch)
        self.begin(self, self._end, lambda _: None)

    def abandon(self, how: How) -> None:
        """Announce once how this rank leaves, and break the ring for all.

        News that is still on its way is lost with the ring. Nobody needs it: once one rank has left, no call of all
        ranks can succeed.
        """
        if self.close(how, self._leave):
            self._side.interrupt()

    def _leave(self, how: How) -> None:
        # keeps _listen() going until the connection breaks: the rank before this one may wait until its BROKEN is read
        self.told = True
        if self.lost is None:
            self.tell(Departure(self._side.rank, how, self._watch.step, self._departures.calls))

    def serve_on(self, failed: bool) -> None:
        """Wait for no rank: there is nothing to serve."""

    def _end(self) -> None:
        self.drop()
        process_exit.running.discard(self)
