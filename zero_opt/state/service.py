"""Serve this rank's part of the state to a rank that calls ``state_dict()`` alone, while training goes on.

[Note: a pull]
The rank that asks sends its point of training round the ring. Each other rank answers directly, from a thread of its
own: READY or why not, then its list of entries. Once the asking rank has made room for all entries, it says "go" to one
rank after the other. That rank sends its elements, then the error, if there was one. The state of a rank may not change
until the rank has sent all.

The asking rank waits on a thread beside the caller's, who may leave: by an exception of a signal handler, or since a
rank is stopped. gloo cannot cancel a wait without ending all connections. So what the thread waits for still comes, and
is dropped, before the next pull begins. Ranks that have not been told to go are told to stop.

[Note: the end]
A rank that closes says so round the ring, and serves on until all ranks have closed; the process's exit waits for
that. The last one to close breaks its connections to end its own wait. No thread can be started by then (Python 3.12).
So the thread that listens, which must not wait, answers what is asked after close(), and a thread that exists from the
beginning delivers it. All asking ranks take from the others in one order, so threads that deliver to one rank at a time
cannot wait for each other in a circle.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm import process_exit
from ..comm.backend_errors import backend_words
from ..comm.departures import Departure, How
from ..comm.groups import bytes_tensor, tensor_bytes
from ..comm.peer_watch import Watch
from ..comm.ring import INTERRUPTION_S, Ring, RingMessage, words_of
from ..comm.side_group import SideGroup
from ..comm.transfers import Transfer, TransferQueue
from ..errors import OptimizerClosed, PeerLost, StateNotConsolidated, name_and_text
from ..system.devices import thread_device
from ..system.failures import on_failure
from ..system.log import log
from .asking import Questions
from .consolidate import FrozenState, IncomingState, LocalState
from .entries import listed, listing, message_to_send, packets
from .guard import NoReentry, StateGuard, Verdict, step_failed
from .messages import (
    ERROR,
    GO,
    LATER,
    MARGIN_S,
    STOP,
    Answer,
    DirectMessages,
    Offer,
    answer_tag,
    broken,
    broken_if_left,
    explained,
    require_not_lost,
)

_State = LocalState | FrozenState


class StateService:
    """The service of one rank's state to the others; see the notes of the module.

    :meth:`pull` is called on any thread, :meth:`close` on the user's; what is below that, as the process ends.

    Args:
        capture: returns this rank's state as it is. watch: that of training, which knows of the ranks that have left.
    """

    def __init__(self, side: SideGroup, guard: StateGuard, capture: Callable[[], LocalState], watch: Watch) -> None:
        self._side, self._guard, self._watch, self._departures = side, guard, watch, watch.departures
        self._capture: Callable[[], LocalState] | None = capture
        self._final: tuple[_State | None, bytes] | None = None
        self._ring = Ring(side, watch)
        self._in_order, self._asking = False, NoReentry("inside state_dict(), on the same thread")
        self._direct = DirectMessages(side, self._departures)
        self._questions = Questions(side, self._direct, watch, self._ring.pass_on)
        self._unwanted: deque[tuple[Transfer, Tensor]] = deque(maxlen=2 * side.world_size)
        self._answering: set[threading.Thread] = set()
        self._serving, self._use_device = process_exit.Serving(), thread_device()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._expires: float | None = None
        self._delivering = threading.Thread(target=self._deliver_all, name="zero_opt state at the end")
        self._ring.begin(self, self._end, self._asked)
        process_exit.threads.start(self._delivering)

    # -- the ring -----------------------------------------------------------------------------------------------------

    def _asked(self, message: RingMessage) -> None:
        """Have another thread answer a pull."""
        if self._final is not None:
            with self._served(message.origin):
                offer = self._offer(message)
                if offer is not None:
                    self._jobs.put(partial(self._deliver_later, offer))
        else:
            thread = threading.Thread(target=self._answer, args=(message,), name="zero_opt state")
            self._answering.add(thread)
            if not process_exit.started(thread):
                self._answering.discard(thread)
                self._jobs.put(partial(self._answer, message))

    def _end(self) -> None:
        """End the threads, and drop state and connections: no rank can ask any more, and none can be asked."""
        self._jobs.put(None)
        self._wait_asked_and_answered(self._delivering)
        with self._ring.lock:
            self._capture = self._final = None
        self._serving.end()
        self._questions.close()
        self._unwanted = deque()  # messages keep the connections open
        self._direct.forget()
        self._ring.drop()
        for thread in (self._delivering, *self._answering):
            process_exit.threads.leave(thread, self._side.broken.waits_end_at)
        process_exit.running.discard(self)

    def _end_ring(self) -> None:
        """End this rank's wait for messages, as the last one that closes, once nobody asks or is answered."""
        with contextlib.suppress(RuntimeError):  # the next rank has ended
            self._ring.wait_passed(INTERRUPTION_S)
        self._wait_asked_and_answered()
        self._side.disconnect()

    def _wait_asked_and_answered(self, *also: threading.Thread) -> None:
        """Wait for the caller that asks, and for the threads that answer: their messages end with the connections."""
        for thread in filter(threading.Thread.is_alive, [*self._answering, *also]):
            thread.join(max(0.0, min(INTERRUPTION_S, self._side.broken.waits_end_at - time.monotonic())))
        self._asking.wait(INTERRUPTION_S)

    # -- answering ----------------------------------------------------------------------------------------------------

    def _answer(self, message: RingMessage) -> None:
        """Answer one pull from beginning to end."""
        self._use_device()
        with self._served(message.origin), self._side.looking(message.origin):
            offer = self._offer(message)
            if offer is not None:
                self._deliver(offer)

    def _deliver_later(self, offer: Offer) -> None:
        with self._served(offer.dst):
            self._deliver(offer)

    def _deliver_all(self) -> None:
        """Do what remains of the pulls after close(), and break off what is not over when their time is."""
        self._use_device()
        while True:
            left = None if self._expires is None else max(0.0, self._expires - time.monotonic())
            try:
                job = self._jobs.get(timeout=left)
            except queue.Empty:
                self._expires = None
                self._side.interrupt()
                continue
            if job is None:
                return
            job()

    @contextlib.contextmanager
    def _served(self, dst: int) -> Iterator[None]:
        """Serve rank ``dst`` within it."""
        try:
            with torch.no_grad(), self._serving.one(), broken_if_left(self._side):
                yield
        except Exception as error:
            log.debug("rank %d does not get the state it asked for: %s", dst, error)
        finally:
            self._answering.discard(threading.current_thread())

    def _offer(self, message: RingMessage) -> Offer | None:
        """Answer whether the state can be had, and list it. After close() this waits for no rank."""
        dst, pull, guard = message.origin, message.pull, self._guard
        tag, verdict = answer_tag(pull), guard.admit(message.changes)
        if verdict is Verdict.BEHIND:
            self._direct.send(dst, tag, *Answer(LATER, guard.step, 0, pull))
            verdict = guard.wait_for(message.changes, self._side.timeout_s)
        if verdict is not Verdict.READY:
            self._direct.send(dst, tag, *Answer(verdict.value, guard.step, 0, pull))
            return None
        with on_failure(guard.leave):
            now = self._capture, self._guard.failure  # in this order, as close() replaces them
            with self._guard.after_change(self._guard.edit_marks()):
                state, payload = self._final or self._listed(*now)
            code = ERROR if state is None else Verdict.READY.value
            self._direct.send(dst, tag, *Answer(code, guard.step, len(payload), pull))
            text = bytes_tensor(payload)
            return Offer(dst, pull, state, text, self._side.send_to(text, dst, tag))

    def _deliver(self, offer: Offer) -> None:
        """Send the elements once the asking rank says "go"."""
        try:
            said, of = STOP, -1
            while of != offer.pull:
                words, tag = words_of(said, of), answer_tag(offer.pull) + 1
                said, of = self._direct.receive(words, offer.dst, tag, self._side.timeout_s + MARGIN_S).tolist()
            if said == GO and offer.state is not None:
                offer.sending.wait(self._side.timeout_s)
                with self._guard.after_change(self._guard.edit_marks()):
                    self._send_elements(offer, offer.state)
            else:  # gloo cancels a message that nobody holds, and a pull that was left still waits for this one
                self._unwanted.append((offer.sending, offer.listing))
        finally:
            self._guard.leave()

    def _listed(
        self, capture: Callable[[], LocalState] | None, failure: Exception | None, freeze: bool = False
    ) -> tuple[_State | None, bytes]:
        """Return the state and its listing, or ``None`` and, as JSON, the error that took their place."""
        try:
            state = self._own_state("it", capture, failure)
            return (FrozenState(state) if freeze else state), listing(state.batches())
        except Exception as error:  # whatever it is, the asking rank must not wait for this one
            return None, json.dumps(name_and_text(error)).encode()

    def _send_elements(self, offer: Offer, state: _State) -> None:
        """Send the elements, and then, as JSON, the error that was met in that, if any."""
        window, failed, tag = TransferQueue(), list[Exception](), answer_tag(offer.pull)
        for packet in packets(listed(tensor_bytes(offer.listing))):
            message = message_to_send(state, packet, failed)
            window.add(self._side.send_to(message, offer.dst, tag), message)
        text = bytes_tensor(json.dumps(name_and_text(failed[0]) if failed else None).encode())
        for words in (words_of(text.numel()), text):
            window.add(self._side.send_to(words, offer.dst, tag), words)
        window.drain()

    # -- asking -------------------------------------------------------------------------------------------------------

    def pull(self) -> dict[int, dict[str, Any]]:
        """Return the full state by global parameter index, in host memory, from all ranks' parts. Not collective.
        Extra memory: the result.

        Raises:
            StepDesync: another rank is ahead of this one, or this thread is in a pull already. PeerLost: one has ended,
                or has not come as far in time. StateDictError, StorageFailed: state of one cannot be sent or read, or
                is not all there. StepFailed: this step failed on one. StateNotConsolidated: closed, or in a fork.
        """
        if self._ring.closed or self._side.inherited:
            raise StateNotConsolidated(
                "this optimizer was closed (as an exit does), or made in the process that this one is forked from, and "
                "holds only its shard of the optimizer state; call opt.state_dict() before"
            )
        with self._asking.held(), self._guard.reading() as changes, self._guard.after_change(self._guard.here()):
            require_not_lost(self._watch)
            own = self._own_state("this rank", self._capture, self._guard.failure)
            try:
                with self._questions.new_pull(self._guard.step) as pull:
                    here, payloads = self._questions.ask(pull, changes, meanwhile=own.batches)
                    listings = [here if text is None else listed(text) for text in payloads]
                    result, rank = IncomingState(own.flats, listings), self._side.rank
                    targets = {other: result.places_for(listings[other]) for other in self._ring.others}
                    self._questions.fetch(
                        pull, targets, meanwhile=lambda: own.copy_to(result.places_for(listings[rank]))
                    )
            except (PeerLost, OptimizerClosed) as error:
                if error.__cause__ is None and self._ring.lost is None:  # no connection has broken
                    raise
                known = explained(self._watch, words := backend_words(error))
                if known is None and not self._ring.told:
                    self._departures.lost_one = True
                    raise
                raise known or broken(self._watch, words) from error
            return result.by_param()

    def _own_state(self, name: str, capture: Callable[[], LocalState] | None, failure: Exception | None) -> LocalState:
        if capture is None:
            raise explained(self._watch, words := backend_words(self._ring.lost), 0.0) or broken(self._watch, words)
        if failure is not None:
            raise step_failed(name, failure) from failure
        return capture()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Serve the state as it is from now on, until all ranks have closed. Does not wait for that."""
        self._ring.close(How.CLOSED, partial(self._leave, in_order=sys.exc_info()[0] is None))

    def abandon(self, how: How) -> None:
        """Do what :meth:`close` does, if the user has not; say ``how`` this rank leaves."""
        self._ring.close(how, partial(self._leave, in_order=False))

    def _leave(self, how: How, in_order: bool) -> None:
        """Say how this rank leaves, and let the threads serve the state as it is."""
        self._in_order, ring, steps = in_order, self._ring, self._guard.completed
        self._guard.finish()
        self._freeze()
        say = ring.tell if self._departures.failed else self._departures.say  # the store may be lost, too
        say(Departure(self._side.rank, how, steps, self._departures.calls))
        self._expires = time.monotonic() + self._side.timeout_s
        self._jobs.put((lambda: None) if ring.open else self._end_ring)

    def _freeze(self) -> None:
        """Keep what serving needs of the state, and no reference to the optimizer or the model."""
        with self._guard.after_change(self._guard.here()):
            self._final = self._listed(self._capture, self._guard.failure, freeze=True)
            self._guard.release()
        self._capture = None

    def serve_on(self, failed: bool) -> None:
        """Wait until all ranks have closed or time is up, unless the program has ``failed``."""
        if not (failed or self._departures.failed):
            self._serving.wait(self._side.timeout_s, self._in_order, lambda: sorted(self._ring.open))

    def break_off(self) -> None:
        """Serve no more, and wait a little for the thread."""
        self._ring.break_off()
