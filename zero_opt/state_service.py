"""Serve this rank's part of the state to a rank that calls ``state_dict()`` alone, while training goes on.

[Note: the ring]
A thread per rank waits for messages of the rank before it and passes each on to the next, until it has been everywhere.
So one blocked receive per rank suffices, nothing polls, and a rank that dies is noticed at once by the one after it,
which breaks its connections in turn. (gloo's receive from any rank does not notice; its waits cannot be cut into
slices, since one that times out ends the group; and a store is polled, or has one server on one rank.)

[Note: a pull]
The rank that asks sends its point of training round the ring. Each other rank answers it directly, from a thread of its
own: READY or why not, then its list of entries. Once the asking rank has made room for all of them it says "go" to one
rank after the other, which sends its elements. Until then, and until a rank has sent all, its state may not change.

[Note: the end]
A rank that closes says so round the ring, and serves on until all have; the process's exit waits for that. No thread
can be started by then (Python 3.12), so what is asked after close() is answered by the thread that listens, which must
not wait, and delivered by one that is there from the beginning. All asking ranks take from the others in one order, so
threads that deliver to one rank at a time cannot wait for each other in a circle.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import process_end
from .collectives import Group, SideGroup, bytes_tensor, tensor_bytes
from .consolidate import FrozenState, FullState, LocalState, chunks, listed, listing, spans
from .errors import PeerLost, StateNotConsolidated, StepDesync, StepFailed, ZeroOptError, error_of_rank
from .flat_param import FlatParam
from .state_guard import WARN_AFTER_S, StateGuard, Verdict
from .system.devices import thread_device
from .transfers import Transfer, Window

_log = logging.getLogger("zero_opt")

# Seconds that a thread may take to wait for messages: for ever, as gloo counts.
_FOR_EVER_S = 10 * 365 * 86400.0
# Seconds that the other side of a bounded wait has on top, so that it hears why.
_MARGIN_S = 30.0
# Seconds that a step, which all ranks may have entered and left with an error, has to end once one has closed.
_GRACE_S = 1.0
# Seconds that threads have to end once their connections are broken.
_INTERRUPTED_S = 5.0
_State = LocalState | FrozenState

# Messages round the ring.
_OPEN, _CLOSED = 0, 1
# What an asking rank says once it has heard all answers.
_GO, _STOP = 0, 1
# Answers beside those of Verdict: it comes later; there is an error in the listing's place.
_LATER, _ERROR = 3, 4
_RING_TAG = 1
# Pulls of one rank that have a tag of their own.
_PULL_TAGS = 1 << 20


class _Message(NamedTuple):
    """Round the ring: ``origin`` asks for the state after so many changes, or has closed after them, in that step."""

    kind: int
    origin: int
    pull: int
    changes: int
    step: int


class _Answer(NamedTuple):
    """To the asking rank.

    Attributes:
        code: a Verdict's value, ``_LATER`` or ``_ERROR``. nbytes: of the listing, or the error, that follows.
    """

    code: int
    step: int
    nbytes: int


class _Offer(NamedTuple):
    """What a rank has been told that it can have.

    Attributes:
        state: ``None`` where the payload, else its listing, is an error. text: the payload that is under way.
    """

    dst: int
    tag: int
    state: _State | None
    payload: bytes
    text: Tensor
    sending: Transfer


def _words(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _step_failed(where: str, failure: Exception) -> StepFailed:
    return StepFailed(
        f"the last step failed on {where} with {type(failure).__name__}: {failure}; its state lacks a part of "
        "that step: load a checkpoint, or step again"
    )


def _answer_tag(pull: int) -> int:
    """Of what an asked rank sends; the asking rank's own words have the tag after it."""
    return _RING_TAG + 1 + 2 * (pull % _PULL_TAGS)


class StateService:
    """This rank's end of the ring; see the notes of the module.

    Args:
        capture: this rank's state as it is at the moment.
        flats: all sharded parameters, by global index.
        control: the group in which the ranks agree on a step.
    """

    def __init__(
        self,
        side: SideGroup,
        guard: StateGuard,
        capture: Callable[[], LocalState],
        flats: dict[int, FlatParam],
        control: Group,
    ) -> None:
        self._side, self._guard = side, guard
        self._flats: dict[int, FlatParam] | None = flats
        self._control: Group | None = control
        self._capture: Callable[[], LocalState] | None = capture
        self._final: tuple[_State | None, bytes] | None = None
        self._in_step: object | None = None
        self._left = (side.rank - 1) % side.world_size
        self._right = (side.rank + 1) % side.world_size
        self._others = [rank for rank in range(side.world_size) if rank != side.rank]
        self._open = set(self._others)
        self._closed = self._in_order = False
        self._lost: Exception | None = None
        self._condition = threading.Condition()
        self._asking = threading.Lock()
        self._pulls = 0
        # What is sent without waiting, lest ranks wait for each other in a circle: round the ring, where each rank has
        # at most two messages under way; and else, where nobody may take it.
        self._passed: deque[tuple[Transfer, Tensor]] = deque(maxlen=4 * side.world_size)
        self._sent: deque[tuple[Transfer, Tensor]] = deque(maxlen=4 * side.world_size)
        self._answering: set[threading.Thread] = set()
        self._serving = process_end.Serving()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._expires: float | None = None
        self._use_device = thread_device()
        self._thread = threading.Thread(target=self._listen, name="zero_opt state ring", daemon=True)
        self._delivering = threading.Thread(target=self._deliver_all, name="zero_opt state at the end", daemon=True)
        process_end.add(self)
        self._thread.start()
        self._delivering.start()

    # -- the ring -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._use_device()
            while self._open:
                words = _words(*[0] * len(_Message._fields))
                self._side.receive_from(words, self._left, _RING_TAG).wait(_FOR_EVER_S)
                message = _Message(*words.tolist())
                if message.origin != self._right:
                    self._pass_on(words)
                self._take(message)
            with self._condition:
                while not self._closed:
                    self._condition.wait(_FOR_EVER_S / 100)
            for transfer, _ in list(self._passed):
                transfer.wait(_INTERRUPTED_S)
        except (ZeroOptError, RuntimeError) as error:
            self._lost = error
            self._side.interrupt()
        finally:
            self._end()

    def _take(self, message: _Message) -> None:
        if message.kind == _CLOSED:
            self._open.discard(message.origin)
            if self._in_step is not None and message.changes == self._guard.changes:
                process_end.started(threading.Timer(_GRACE_S, self._leave_step, [self._in_step]))
            return
        if self._final is not None:
            with self._served(message.origin):
                offer = self._offer(message)
                if offer is not None:
                    self._jobs.put(partial(self._deliver_later, offer))
            return
        thread = threading.Thread(target=self._answer, args=(message,), name="zero_opt state")
        self._answering.add(thread)
        if not process_end.started(thread):
            self._answering.discard(thread)
            self._jobs.put(partial(self._answer, message))

    def _end(self) -> None:
        """No rank can ask any more, and none can be asked."""
        self._jobs.put(None)
        for thread in [*self._answering, self._delivering]:
            thread.join(_INTERRUPTED_S)
        with self._condition:
            self._capture = self._final = None
        self._serving.over()
        self._side.close()
        process_end.running.discard(self)

    def _send(self, dst: int, tag: int, *numbers: int) -> None:
        words = _words(*numbers)
        self._sent.append((self._side.send_to(words, dst, tag), words))

    def _pass_on(self, words: Tensor) -> None:
        self._passed.append((self._side.send_to(words, self._right, _RING_TAG), words))

    def _send_round(self, kind: int, pull: int, changes: int) -> None:
        self._pass_on(_words(*_Message(kind, self._side.rank, pull, changes, self._guard.step)))

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Within it this rank waits for all ranks to enter a step, and not for one that has closed before it.

        Raises:
            PeerLost: one has, or does so meanwhile.
        """
        self._in_step = object()
        try:
            closed = sorted(set(self._others) - self._open)
            if closed:
                raise PeerLost(
                    f"rank {closed[0]} has closed this optimizer, or ended, before step {self._guard.step}; let every "
                    "rank take as many steps, or take uneven ones under torch.distributed.algorithms.Join"
                )
            yield
        finally:
            self._in_step = None

    def _leave_step(self, step: object) -> None:
        """End the wait of a step that a rank will not enter, if it still goes on."""
        control = self._control
        if self._in_step is step and control is not None:
            control.interrupt()

    # -- answering ----------------------------------------------------------------------------------------------------

    def _answer(self, message: _Message) -> None:
        """Answer one pull from beginning to end."""
        self._use_device()
        with self._served(message.origin):
            offer = self._offer(message)
            if offer is not None:
                self._deliver(offer)

    def _deliver_later(self, offer: _Offer) -> None:
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
        """Within it this rank serves another."""
        try:
            with torch.no_grad(), self._serving.one():
                yield
        except Exception as error:  # whatever it is, the asking rank must not wait for this one
            _log.debug("rank %d does not get the state it asked for: %s", dst, error)
            self._side.interrupt()
        finally:
            self._answering.discard(threading.current_thread())

    def _offer(self, message: _Message) -> _Offer | None:
        """Say whether the state can be had, and list it. Waits for nobody after close()."""
        dst, tag, guard = message.origin, _answer_tag(message.pull), self._guard
        verdict = guard.admit(message.changes)
        if verdict is Verdict.BEHIND:
            self._send(dst, tag, *_Answer(_LATER, guard.step, 0))
            verdict = guard.wait_for(message.changes, self._side.timeout_s)
        if verdict is not Verdict.READY:
            self._send(dst, tag, *_Answer(verdict.value, guard.step, 0))
            return None
        try:
            now = self._capture, self._guard.failure  # in this order, as close() replaces them
            with self._guard.after_change():
                state, payload = self._final or self._listed(*now)
            self._send(dst, tag, *_Answer(_ERROR if state is None else Verdict.READY.value, guard.step, len(payload)))
            text = bytes_tensor(payload)
            return _Offer(dst, tag, state, payload, text, self._side.send_to(text, dst, tag))
        except BaseException:
            guard.leave()
            raise

    def _deliver(self, offer: _Offer) -> None:
        """Send the elements once the asking rank says so."""
        try:
            word = _words(_STOP)
            self._side.receive_from(word, offer.dst, offer.tag + 1).wait(self._side.timeout_s + _MARGIN_S)
            if word.item() == _GO and offer.state is not None:
                offer.sending.wait(self._side.timeout_s)
                with self._guard.after_change():
                    self._send_elements(offer, offer.state)
        finally:
            self._guard.leave()

    def _listed(
        self, capture: Callable[[], LocalState] | None, failure: Exception | None, freeze: bool = False
    ) -> tuple[_State | None, bytes]:
        """The state and its listing, or ``None`` and the error that there is instead."""
        try:
            state = self._own_state("it", capture, failure)
            return (FrozenState(state) if freeze else state), listing(state)
        except Exception as error:  # whatever it is, the asking rank must not wait for this one
            return None, json.dumps([type(error).__name__, str(error)]).encode()

    def _send_elements(self, offer: _Offer, state: _State) -> None:
        window = Window()
        for entry in listed(offer.payload):
            for chunk in chunks(state, entry):
                window.add(self._side.send_to(chunk, offer.dst, offer.tag), chunk)
        window.drain()

    # -- asking -------------------------------------------------------------------------------------------------------

    def pull(self) -> dict[int, dict[str, Any]]:
        """The full state by global parameter index, in host memory, made of all ranks' parts. Not collective.

        Extra memory: the result.

        Raises:
            StepDesync: another rank is ahead of this one. PeerLost: one has ended, or has not come as far in time.
            StateDictError: state of one cannot be sent. StepFailed and others: why one has no state of this step.
            StateNotConsolidated: closed, or in a fork.
        """
        flats = self._flats
        if self._closed or flats is None or self._side.inherited:
            raise StateNotConsolidated(
                "this optimizer was closed, or made in the process that this one is forked from, and holds only its "
                "shard of the optimizer state; call opt.state_dict() before"
            )
        with self._asking, self._guard.reading() as changes, self._guard.after_change(self._guard.here()):
            own = self._own_state("this rank", self._capture, self._guard.failure)
            self._pulls += 1
            unasked = set(self._others)
            try:
                payloads = self._ask(changes)
                result = FullState(flats)
                targets = [self._place(result, own, payload) for payload in payloads]
                for rank in self._others:
                    unasked.discard(rank)
                    self._fetch(rank, targets[rank])
            finally:
                with contextlib.suppress(RuntimeError):
                    for rank in unasked:
                        self._send(rank, _answer_tag(self._pulls) + 1, _STOP)
            return result.by_param()

    def _own_state(self, name: str, capture: Callable[[], LocalState] | None, failure: Exception | None) -> LocalState:
        if capture is None:
            raise PeerLost(
                f"this rank holds only a shard of the state, and another has ended: {self._lost}; restart all ranks "
                "from a checkpoint"
            )
        if failure is not None:
            raise _step_failed(name, failure) from failure
        return capture()

    def _ask(self, changes: int) -> list[bytes | None]:
        """Ask all ranks; their listings, ``None`` for this rank."""
        heard: dict[int, int | None] = dict.fromkeys(self._others)
        warning = threading.Timer(WARN_AFTER_S, self._warn, [heard])
        process_end.started(warning)
        try:
            self._send_round(_OPEN, self._pulls, changes)
            return [None if rank == self._side.rank else self._answer_of(rank, heard) for rank in range(len(heard) + 1)]
        finally:
            warning.cancel()

    def _warn(self, heard: dict[int, int | None]) -> None:
        ranks = ", ".join(
            f"rank {rank}" + ("" if step is None else f" (in step {step})") for rank, step in sorted(heard.items())
        )
        _log.warning("state_dict() in step %d has waited %d s for %s", self._guard.step, WARN_AFTER_S, ranks)

    def _answer_of(self, rank: int, heard: dict[int, int | None]) -> bytes:
        """A rank's listing. ``heard`` has the step of each that has not given its own."""
        tag, patience_s, mine = _answer_tag(self._pulls), self._side.timeout_s + _MARGIN_S, self._guard.step
        answer = _Answer(_LATER, 0, 0)
        while answer.code == _LATER:
            words = _words(*answer)
            self._side.receive_from(words, rank, tag).wait(patience_s)
            answer = _Answer(*words.tolist())
            heard[rank] = answer.step
        if answer.code == Verdict.AHEAD.value:
            raise StepDesync(
                f"state_dict() in step {mine} of this rank, but rank {rank} has entered step {answer.step + 1}, or "
                "loaded or added what this one has not; call it between steps"
            )
        if answer.code == Verdict.BEHIND.value:
            raise PeerLost(
                f"state_dict() in step {mine} of this rank, but rank {rank} has stayed in step {answer.step}; let "
                "every rank take this step, or give them longer with checks=Checks(timeout=...)"
            )
        text = torch.empty(answer.nbytes, dtype=torch.uint8)
        self._side.receive_from(text, rank, tag).wait(patience_s)
        if answer.code == _ERROR:
            raise error_of_rank(rank, *json.loads(tensor_bytes(text)))
        del heard[rank]
        return tensor_bytes(text)

    def _place(self, result: FullState, own: LocalState, payload: bytes | None) -> list[Tensor]:
        """Make room for what a rank has; the runs that its messages go to."""
        if payload is None:
            result.add_own(own)
            return []
        runs: list[Tensor] = []
        for entry in listed(payload):
            target = result.place(entry)
            if target is not None:
                runs.extend(target[span] for span in spans(entry))
        return runs

    def _fetch(self, rank: int, runs: list[Tensor]) -> None:
        tag, window, complete = _answer_tag(self._pulls), Window(), False
        try:
            self._send(rank, tag + 1, _GO)
            for run in runs:
                window.add(self._side.receive_from(run, rank, tag), run)
            window.drain()
            complete = True
        finally:
            if not complete:  # the other rank waits for this one to take the rest
                self._side.interrupt()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The user closes: serve the state as it is, until all ranks have closed; does not wait for that."""
        self._close(in_order=sys.exc_info()[0] is None)

    def abandon(self) -> None:
        """As :meth:`close`, where the user has not: the program may have failed."""
        self._close(in_order=False)

    def _close(self, in_order: bool) -> None:
        if self._side.inherited:  # where nothing runs, and locks may be held for ever
            self._side.close()
            return
        with self._condition:
            if self._closed:
                return
            self._closed, self._in_order = True, in_order
            self._guard.finish()
            self._freeze()
            with contextlib.suppress(RuntimeError):
                self._send_round(_CLOSED, 0, self._guard.changes)
            self._expires = time.monotonic() + self._side.timeout_s
            self._jobs.put(lambda: None)
            self._condition.notify_all()

    def _freeze(self) -> None:
        """Keep what serving needs of the state, and nothing else of the optimizer, nor of the model."""
        with self._guard.after_change(self._guard.here()):
            self._final = self._listed(self._capture, self._guard.failure, freeze=True)
            self._guard.mark()
        self._flats = self._capture = self._control = None
        self._guard.failure = None  # its traceback leads to them

    def join(self, failed: bool) -> None:
        """See :class:`process_end.Service`."""
        if not failed:
            self._serving.wait(self._side.timeout_s, self._in_order, lambda: sorted(self._open))
        self._side.interrupt()
        self._thread.join(_INTERRUPTED_S)
