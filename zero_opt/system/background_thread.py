"""One background thread that runs submitted calls in order."""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..errors import OutOfResources
from .devices import thread_device
from .future import Future
from .interrupts import uninterrupted
from .phases import BusySeconds
from .stages import CallStages, Lane, UnderWay, in_one_go
from .threads import BackgroundThreads

# Of a call in stages, the lane.
_Job = tuple[Future[Any], Lane | None, Callable[..., Any], tuple[Any, ...]]


# How long the interpreter's exit waits for calls that still run, and then for those that it has interrupted.
_PATIENCE_S = 5.0
_INTERRUPTED_PATIENCE_S = 5.0
# Set once threads are ended, after which none may be started.
_over = threading.Event()
_threads = BackgroundThreads()
# For each thread: its jobs, and a function that makes its current call end soon, with an error.
_running: dict[threading.Thread, tuple[queue.SimpleQueue[_Job | None], Callable[[], None] | None]] = {}


def _run(jobs: queue.SimpleQueue[_Job | None], begin: Callable[[], None], busy: BusySeconds) -> None:
    under_way = UnderWay()
    while True:
        if not under_way:
            busy.end()
        try:
            job = jobs.get(block=not under_way)
        except queue.Empty:  # nothing to begin
            under_way.advance()
            continue
        if job is None:
            break
        busy.begin()
        future, lane, call, arguments = job
        try:
            begin()
            if lane is None:
                under_way.end_all()
                result = call(*arguments)
            else:
                stages = call(*arguments)
        except BaseException as error:  # raised where the future is waited for
            future.set_exception(error)
        else:
            if lane is None:
                future.set_result(result)
                del result
            else:
                under_way.begin(lane, stages, future)
                del stages
        # Do not keep the last job's tensors, or its result, alive while waiting for the next one.
        del job, future, call, arguments
    under_way.end_all()
    _running.pop(threading.current_thread(), None)


@uninterrupted()
def _end_all() -> None:
    """Let calls that are under way finish, interrupt those that take long, and end all threads."""
    _over.set()
    for jobs, _ in dict(_running).values():
        jobs.put(None)
    late = _threads.join(_PATIENCE_S)
    interrupts = [interrupt for thread in late if thread in _running and (interrupt := _running[thread][1]) is not None]
    for interrupt in interrupts:
        interrupt()
    if interrupts:
        late = _threads.join(_INTERRUPTED_PATIENCE_S)
    for thread in late:
        _threads.leave(thread)
    _threads.hold()


# Registered twice: if Ctrl-C interrupts a callback before its first line, the interpreter goes on to the next one. The
# second one does not wait again for what the first has waited for.
atexit.register(_end_all)
atexit.register(_end_all)


class CallingThread:
    """A stand-in for :class:`SerialThread` that runs each call at once, on the thread that submits it."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run ``call(*arguments)``; its result or exception is in the future."""
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # raised where the future is read, as that of a thread
            future.set_exception(error)
        return future

    def submit_stages(self, lane: Lane, call: Callable[..., CallStages[Any]], *arguments: Any) -> Future[Any]:  # noqa: ARG002
        """Run all stages of ``call(*arguments)``."""
        return self.submit(lambda: in_one_go(call(*arguments)))


class SerialThread:
    """A daemon thread that runs calls one after the other, except for the stages of :meth:`submit_stages`.

    An exchange that a dead peer blocks cannot block the interpreter's exit, which joins the threads of
    ``concurrent.futures.ThreadPoolExecutor``. The thread has the device that is current where the first call is
    submitted.

    Attributes:
        busy: how long it has run calls.
    """

    def __init__(self, name: str, interrupt: Callable[[], None] | None = None) -> None:
        """Start nothing yet; ``interrupt`` makes a call that waits end soon, with an error, at interpreter exit."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name, self._interrupt, self.busy = name, interrupt, BusySeconds()
        self._closed, self._pid = False, os.getpid()

    def close(self) -> None:
        """Let the thread end once it has run what is queued; does not wait for it."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)

    # Not weakref.finalize: interpreter exit goes through all of those, and fails if another thread adds or drops one.
    def __del__(self) -> None:
        if not _over.is_set():
            self.close()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue ``call(*arguments)``; its result or exception arrives in the future.

        Raises:
            RuntimeError: the thread does not run yet, and the interpreter's exit has begun.
            OutOfResources: the operating system refuses a thread.
        """
        return self._queue(None, call, arguments)

    def submit_stages(self, lane: Lane, call: Callable[..., CallStages[Any]], *arguments: Any) -> Future[Any]:
        """Queue a call in stages, as :meth:`submit` does; while it pauses, such calls that follow may begin.

        Args:
            lane: which of those.
        """
        return self._queue(lane, call, arguments)

    def _queue(self, lane: Lane | None, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        self.begin()
        if self._thread is not None:
            _threads.leave(self._thread, math.inf)  # the exit waits for it again
        future: Future[Any] = Future()
        self._jobs.put((future, lane, call, arguments))
        return future

    def begin(self) -> None:
        """Let the thread run before the first call; raises what :meth:`submit` raises."""
        if self._thread is None and not self._forked:
            if _over.is_set():
                raise RuntimeError("can't start a thread once the interpreter's exit has begun")
            thread = threading.Thread(target=_run, args=(self._jobs, thread_device(), self.busy), name=self._name)
            with uninterrupted():  # a thread that runs and is not known here would be given a second one beside it
                _threads.start(thread)
                self._thread = thread
                _running[thread] = (self._jobs, self._interrupt)

    def refusal(self) -> OutOfResources | None:
        """Let the thread run, as :meth:`begin` does, and return the error if the operating system refuses it.

        Called before ranks agree on what needs the thread: after that, the others would wait for this one.
        """
        try:
            self.begin()
        except OutOfResources as error:
            return error
        return None

    def leave(self, at: float = 0.0) -> None:
        """Keep the interpreter's exit from waiting for the call under way, for which nothing waits any more.

        Args:
            at: from when on, by the monotonic clock.
        """
        if self._thread is not None:
            _threads.leave(self._thread, at)

    def idle_within(self, seconds: float) -> bool:
        """Return whether all that was submitted is over, after so many seconds at the most."""
        return not self.runs or self.submit(lambda: None).wait(seconds)

    @property
    def runs(self) -> bool:
        """Whether there is a thread: from the first call to interpreter exit, and in no fork."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def accepts_calls(self) -> bool:
        """Whether calls that are submitted will run: the thread runs, and has not been told to end."""
        return self.runs and not self._closed and not _over.is_set()

    @property
    def ended(self) -> bool:
        """Whether calls would not be run: interpreter exit has begun, or this is a fork, or it was closed."""
        return _over.is_set() or self._closed or self._forked or (self._thread is not None and not self.runs)

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def is_current(self) -> bool:
        """Whether this is the thread."""
        return self._thread is threading.current_thread()


def run_apart(call: Callable[[], object], patience_s: float) -> Future[Any]:
    """Run a call on a thread of its own, and wait for it, but no longer than ``patience_s``.

    Such is a finalizer's: the garbage collector may come to a finalizer anywhere, inside modes and transforms of
    torch's, which would take what the call does with tensors; and while the thread holds what the call waits for. And
    such is one that may never return. The interpreter's exit, during which it may begin, does not wait for it.
    """
    ended: Future[Any] = Future()
    use_device = thread_device()

    def run() -> None:
        use_device()
        ended.set_result(CallingThread().submit(call).exception(0))

    thread = threading.Thread(target=run, name="zero_opt end")
    try:
        _threads.start(thread)
    except RuntimeError:  # there is no thread to be had
        run()
    if not ended.wait(patience_s):
        _threads.leave(thread)
    return ended
