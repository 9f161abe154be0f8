"""The point of training of this rank's state, and the lock between its readers and its changes."""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..comm.stops import WARN_AFTER_S
from ..errors import OutOfResources, PeerLost, StepDesync, StepFailed, StorageFailed, WorkerDied, WorkerFailed
from ..system.devices import build_streams, is_host
from ..system.failures import on_failure
from ..system.future import Future
from ..system.log import log
from ..system.streams import Streams

# A reader looks again after so many seconds: a signal handler may have interrupted what would have told it.
_LOOK_AGAIN_S = 1.0
# A device, one of its streams, and an event on that stream.
Mark = tuple[torch.device, Any, Any]


def marks(streams: Mapping[torch.device, Streams]) -> list[Mark]:
    """Return, per accelerator, an event after what the current stream has been given."""
    return [(device, *there.produced()) for device, there in streams.items() if not is_host(device)]


# What an error about a state_dict() in the middle of another call says to do.
CALL_LATER = "call it between steps; in a signal handler set a flag instead, and save once the step has returned"


def step_failed(where: str, failure: Exception) -> StepFailed:
    """Return the error for a rank that asks for state after a step has failed."""
    return StepFailed(
        f"the last step failed on {where} with {type(failure).__name__}: {failure}; its state lacks a part of "
        "that step: load a checkpoint, or step again"
    )


class Verdict(enum.Enum):
    """What to answer a rank that wants this rank's state at a point of training."""

    READY = 0
    BEHIND = 1
    AHEAD = 2


class NoReentry:
    """A lock that no thread takes twice, as a signal handler would that has interrupted the holder."""

    def __init__(self, where: str) -> None:
        """``where``: what the holder is doing, for messages."""
        self._where, self._lock, self._held = where, threading.RLock(), False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for other threads, and hold the lock.

        Raises:
            StepDesync: this thread holds it already, which a signal handler has interrupted.
        """
        with self._lock:
            if self._held:
                raise StepDesync(f"state_dict() was called {self._where}; {CALL_LATER}")
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def wait(self, seconds: float) -> None:
        """Wait until no thread holds the lock, for so long at the most."""
        if self._lock.acquire(timeout=seconds):
            self._lock.release()


class StateGuard:
    """The lock on this rank's state: many threads may read the state, or the user's thread may change it.

    A change begins when every rank has entered the call that makes it: with :meth:`begin`, on the user's thread. A
    change ends with :meth:`commit`, on every rank the same number of times. State whose change has failed half-way is
    at no point of training until the next commit. Readers are threads that serve other ranks (:meth:`wait_for`, then
    :meth:`leave`), and those that call ``state_dict()`` (:meth:`reading`).

    Args:
        here: returns :func:`marks` of what the calling thread has enqueued so far; called where a change ends.

    Attributes:
        changes: changes committed. step: optimizer steps among them.
        failure: why the last step failed on this rank, if it did; until another step is taken or a state is loaded.
    """

    def __init__(self, here: Callable[[], Sequence[Mark]] = tuple) -> None:
        self.here, self._marks = here, tuple[Mark, ...]()
        self._edits: list[weakref.WeakMethod[Callable[[], Sized]]] = []
        self._idle: dict[torch.device, list[Streams]] = {}
        self.changes = self.step = 0
        self.failure: Exception | None = None
        self._told = False
        self._lock, self._changed = threading.RLock(), Future[None]()  # see [Note: locks and signal handlers]
        self._readers = self._own_readers = 0
        self._waiting = self._changing = self._final = False
        self._broken: tuple[type[BaseException], str, str] | None = None  # an error, its text, and what it ended
        self._call = ""  # that changes the state, if not a step

    def notice_edits(self, *edits: Callable[[], Sized]) -> None:
        """Ask these methods what the user has written to since the last change.

        They are referenced weakly, since threads that serve the state of a collected optimizer keep the guard.
        """
        self._edits += map(weakref.WeakMethod, edits)

    # -- changing -----------------------------------------------------------------------------------------------------

    def begin(self, patience_s: float) -> None:
        """Wait until no thread reads the state, and let none begin to; none of this rank's begins meanwhile either.

        Raises:
            PeerLost: another rank, or a thread of this one, still reads after ``patience_s`` seconds.
        """
        with self.moving(patience_s):
            self._changing, self._broken = True, None

    @contextmanager
    def moving(self, patience_s: float) -> Iterator[None]:
        """Move the state to other memory, as it is, once no thread reads it. Readers that come meanwhile wait.

        Raises:
            PeerLost: as :meth:`begin`.
        """
        begun, warn_after = time.monotonic(), WARN_AFTER_S
        self._waiting = True
        try:
            while True:
                with self._lock:
                    if not self._readers:
                        self._waiting = False
                        yield
                        return
                    changed = self._changed
                waited = time.monotonic() - begun
                if waited > patience_s:
                    raise self._still_read(waited)
                if waited > warn_after:
                    warn_after = patience_s
                    log.warning("step %d waits for a state_dict() of the state before it", self.step)
                changed.wait(min(patience_s - waited, WARN_AFTER_S) + 0.01)
        finally:
            self._waiting = False

    def _still_read(self, waited_s: float) -> PeerLost:
        reader = "state_dict() on another thread of this rank" if self._own_readers else "another rank"
        return PeerLost(
            f"{reader} has been reading the state of step {self.step} for {waited_s:.0f} s; give it longer "
            "with checks=Checks(timeout=...)"
        )

    def _tell(self) -> None:
        """End the waits for a change; those that wait look again, and wait for the next. Called under the lock."""
        changed, self._changed = self._changed, Future()
        changed.set_result(None)

    @contextmanager
    def changing(self, patience_s: float, step: int) -> Iterator[None]:
        """Make a change from :meth:`begin` to :meth:`commit`; take it back if it fails."""
        self.begin(patience_s)
        with on_failure(self.take_back):
            yield
        self.commit(step)

    @contextmanager
    def telling_why(self, call: str = "") -> Iterator[None]:
        """Keep the exception that leaves a change half-way: ranks that ask for the state then are told of it.

        Args:
            call: what changes the state, if not a step.
        """
        self._call = call
        try:
            yield
        except BaseException as error:
            if self._changing and self._broken is None:  # a traceback would lead to the model
                self._broken = type(error), str(error), self._change()
            raise
        else:
            self._call = ""

    @contextmanager
    def making_up(self, patience_s: float) -> Iterator[None]:
        """Begin a change that brings in the missing part of the last step; if that fails, the part is missing still.

        The caller tells all ranks, and ends the change: with :meth:`commit`, or :meth:`take_back` if it fails on one.
        """
        self.begin(patience_s)
        try:
            yield
        except Exception as error:
            self.failure, self._told = error, True
            raise
        self.note_failure(None)

    def take_back(self) -> None:
        """End a change that has changed nothing."""
        with self._lock:
            self._changing = False

    def commit(self, step: int) -> None:
        """Complete the change, as far as this rank has enqueued it, after ``step`` optimizer steps."""
        self._marks = tuple(self.here())
        with self._lock:
            self.changes, self.step, self._changing = self.changes + 1, step, False
            self._tell()

    def note_failure(self, failure: Exception | None) -> None:
        """Note why the step failed on this rank, which no other rank knows; ``None``: the state is complete again."""
        self.failure, self._told = failure, False

    @property
    def completed(self) -> int:
        """The steps of which this rank has all parts."""
        return self.step - (self.failure is not None)

    def note_told(self) -> None:
        """Note that every rank knows that the step has failed on one."""
        self._told = True

    def untold_failure(self) -> StepFailed | None:
        """Return the error of :meth:`missing_part`, or ``None`` if every rank knows of it."""
        return None if self._told else self.missing_part()

    def missing_part(self) -> StepFailed | None:
        """Return the error for all ranks if a part of the last step is missing here."""
        failure = self.failure
        if failure is None:
            return None
        pending = isinstance(failure, (OutOfResources, StorageFailed, WorkerDied, WorkerFailed))
        error = StepFailed(
            f"step {self.step - 1} failed with {type(failure).__name__}: {failure}; parameters are the same on "
            f"all ranks, but without a part of that step{'' if pending else ': load a checkpoint, or go on'}"
        )
        error.__cause__ = failure
        return error

    def finish(self) -> None:
        """End the wait of readers for further changes."""
        with self._lock:
            self._final = True
            self._tell()

    def release(self) -> None:
        """Let readers have the copy that this thread has enqueued, and drop references to the original."""
        self._marks = tuple(self.here())
        self.here = tuple
        self._edits.clear()
        self.failure = None  # its traceback leads to the model

    # -- reading ------------------------------------------------------------------------------------------------------

    def admit(self, changes: int) -> Verdict:
        """Let a reader in if the state is at that number of changes; each reader that is let in calls :meth:`leave`."""
        with self._lock:
            if changes < self.changes or (self._changing and changes == self.changes):
                return Verdict.AHEAD
            if changes > self.changes:
                return Verdict.BEHIND
            self._readers += 1
            return Verdict.READY

    def wait_for(self, changes: int, patience_s: float) -> Verdict:
        """Wait until the state is not behind, for ``patience_s`` seconds at most, and :meth:`admit` the reader."""
        end = time.monotonic() + patience_s
        while True:
            with self._lock:
                left = end - time.monotonic()
                if self.changes >= changes or self._final or left <= 0:
                    return self.admit(changes)
                changed = self._changed
            changed.wait(min(left, _LOOK_AGAIN_S))

    def leave(self) -> None:
        """Let a reader out."""
        with self._lock:
            self._readers -= 1
            self._tell()

    def edit_marks(self) -> Sequence[Mark]:
        """Return marks after the user's writes since the last change, on the streams of that change and default ones.

        The user's thread does not mark its writes. So these marks also come after all else that the thread has enqueued
        there. Without writes there are no marks.
        """
        if not any(edits() for reference in list(self._edits) if (edits := reference()) is not None):
            return ()
        return [*((device, stream, stream.record_event()) for device, stream, _ in self._marks), *self.here()]

    @contextmanager
    def after_change(self, also: Sequence[Mark] = ()) -> Iterator[None]:
        """Enqueue what follows on streams for readers, after the last change and ``also``, and after nothing else.

        A reader must not wait for the whole device: that includes collectives of a later backward, which may wait for
        the rank that reads. For the same reason readers share no stream with a collective. A device has few streams, so
        readers' streams are kept, and have another priority.
        """
        with ExitStack() as stack:
            for device, _, event in self._marks:
                streams = self._take_streams(device)
                stack.callback(self._idle[device].append, streams)
                stack.enter_context(streams.side([event, *(other for at, _, other in also if at == device)], ()))
            yield

    def _take_streams(self, device: torch.device) -> Streams:
        """Return streams that no other thread uses at the moment."""
        with self._lock:
            idle = self._idle.setdefault(device, [])
            return idle.pop() if idle else build_streams(device, priority=-1)

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Read the state as it is, and yield the number of changes.

        Raises:
            StepDesync: the state is being changed, a change waits for its turn, which readers that come again and again
                would never leave it, or one has failed half-way. PeerLost: as a rank was lost.
        """
        with self._lock:
            self.require_readable()
            self._readers += 1
            self._own_readers += 1
            changes = self.changes
        try:
            yield changes
        finally:
            with self._lock:
                self._own_readers -= 1
                self.leave()

    @property
    def is_changing(self) -> bool:
        """Whether the state is being changed or a change waits for its turn, or one has failed half-way."""
        return self._changing or self._waiting

    def require_readable(self) -> None:
        """Raise the error of :meth:`reading` during a change, or after one that has failed half-way."""
        if not self.is_changing:
            return
        self.require_whole()
        doing = "goes on" if self._call else "is being taken"
        raise StepDesync(f"state_dict() was called while {self._change()} {doing}; {CALL_LATER}")

    def _change(self) -> str:
        return f"{self._call} before step {self.step}" if self._call else f"step {self.step}"

    def require_whole(self) -> None:
        """Raise the error of :meth:`half_way`, if there is one."""
        if (error := self.half_way()) is not None:
            raise error

    def half_way(self) -> StepDesync | PeerLost | None:
        """Return the error about a change that has failed half-way, if the last one did."""
        if not self._changing or self._broken is None:
            return None
        kind, text, change = self._broken
        left = f"this rank's state is that of no step, since {change} was left half-way"
        if issubclass(kind, PeerLost):
            return kind(f"{left}: {text}")
        again = "" if self._final else ", or load it on all ranks"  # which those cannot that have left training
        return StepDesync(
            f"{left} with {kind.__name__}{': ' * bool(text)}{text}; restart all ranks from the last checkpoint{again}"
        )
