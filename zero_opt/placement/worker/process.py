"""The worker: a native process beside this one that steps what lies in an arena both of them map.

It is started by path, with neither torch nor this package, and told nothing but file descriptors; all else is in the
arena. A worker may be killed at any instruction: the arena then holds all that a successor needs to finish its step.
That is also how one is ended here, and how it is replaced when it does not get on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import OutOfResources, WorkerDied, WorkerFailed
from ...kernels.checks import DTYPE_NAMES
from ...kernels.runs import RunBatch
from ...policies import WorkerOffload
from ...system.background_thread import SerialThread
from ...system.extension import native
from ...system.limits import NO_DESCRIPTORS, descriptor_errors
from ...system.log import log
from ...system.shared_memory import (
    CLOSED_BY_PROGRAM,
    GrowingArena,
    above_stdio,
    close_own,
    memory_errors,
    require_memory,
)
from ...system.threads import THREAD_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")

_MAIN = Path(__file__).with_name("worker_main.py")
# Of one step: far more than there are parameters in a rank's shard. Entries that are not used take no memory.
_MAX_RUNS = 1 << 16
# Parts of a step that its threads take as they come to them, so that none waits long for another.
_LANES_PER_THREAD = 32
# A wait returns to Python this often, for Ctrl-C, and to see whether the worker gets on.
_WAIT_SLICE_S = 0.05
_READY_LOOK_MS = 2
_READY_S = 120.0
# How long the kernel may take to end a process that was killed.
_END_S = 40.0
# How long the starter's thread may take for a call.
_CALL_S = 60.0
_STDERR_BYTES = 2000


def control_nbytes(threads: int, runs: int = _MAX_RUNS) -> int:
    """Bytes of the control area of a worker with so many threads; those in use if its steps have so many runs."""
    return native.control_nbytes(_LANES_PER_THREAD * threads, runs)


@contextlib.contextmanager
def _waking() -> Iterator[None]:
    """Within it, that a worker cannot be woken is a WorkerFailed."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerFailed(f"{error}; {CLOSED_BY_PROGRAM}") from error


@contextlib.contextmanager
def _growing() -> Iterator[None]:
    """Within it, that the arena's descriptor is closed is a WorkerFailed."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        raise WorkerFailed(f"the worker's memory cannot be made longer ({error}); {CLOSED_BY_PROGRAM}") from error


class _Child:
    """One worker process. Belongs to the process that started it: a fork of that one leaves it alone.

    Attributes:
        generation: how many workers had become ready in the arena when it was started.
    """

    def __init__(self, arguments: Sequence[str], fds: Sequence[int], generation: int) -> None:
        self._owner, self.generation = os.getpid(), generation
        if not sys.executable:
            raise WorkerFailed("cannot start a worker: sys.executable does not name a Python interpreter")
        with descriptor_errors("a worker process"), contextlib.ExitStack() as undo:
            try:
                self._stderr = above_stdio(os.memfd_create("zero_opt worker stderr", os.MFD_CLOEXEC))
                undo.callback(os.close, self._stderr)
                self._popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_MAIN), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    pass_fds=tuple(fds),
                    cwd="/",
                    start_new_session=True,  # a terminal's Ctrl-C is for the trainer
                )
                undo.callback(self._kill)
                self.pid = self._popen.pid
                self.pidfd = above_stdio(os.pidfd_open(self.pid))  # our child, and not reaped: the pid is its own
            except OSError as error:
                if error.errno in NO_DESCRIPTORS:
                    raise
                if error.errno == errno.EAGAIN:  # of fork()
                    raise OutOfResources(
                        f"cannot start a worker process ({error}); raise the limit of {THREAD_LIMIT}"
                    ) from error
                hint = f"; {CLOSED_BY_PROGRAM}" if error.errno == errno.EBADF else ""
                raise WorkerFailed(f"cannot start a worker: {error}{hint}") from error
            undo.pop_all()
        self._poll = select.poll()
        self._poll.register(self.pidfd, select.POLLIN)

    def dead(self, patience_ms: int) -> bool:
        """Whether the process has ended, or does within that time."""
        try:
            return bool(self._poll.poll(patience_ms))
        except OSError:  # for a moment the kernel lacks memory; the next look tells
            time.sleep(patience_ms / 1000)
            return False

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, once it has been ended."""
        return (self._popen.returncode or 0) < 0

    def said(self) -> str:
        """The end of what it has written to its standard error; nothing if the program has closed that."""
        try:
            start = max(os.fstat(self._stderr).st_size - _STDERR_BYTES, 0)
            return os.pread(self._stderr, _STDERR_BYTES, start).decode(errors="replace").strip()
        except OSError:
            return ""

    def _kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._popen.kill()
        return self._popen.wait(timeout=_END_S)

    def end(self) -> str:
        """Kill and reap it; how it ended.

        Raises:
            WorkerFailed: the process does not end, or may not be ended, so its memory must not be used by another.
        """
        if os.getpid() != self._owner:
            self._popen.returncode = 0  # not ours to reap, nor to warn of
            return ""
        try:
            code = self._kill()
        except subprocess.TimeoutExpired:
            raise WorkerFailed(f"worker process {self.pid} was killed {_END_S:.0f} s ago and has not ended") from None
        except PermissionError:
            raise WorkerFailed(
                f"worker process {self.pid} cannot be ended: this process has given up the rights with which it "
                "started the worker, which ends with this process; call close() before os.setuid()"
            ) from None
        for fd in (self.pidfd, self._stderr):
            close_own(fd)
        if code == 0:  # also where the program ignores SIGCHLD, or has reaped it
            return "exit status 0, or unknown"
        return f"signal {-code}" if code < 0 else f"exit status {code}"


class _Handles:
    """The file descriptors of a worker, and the process that runs; both end with this process.

    Workers are started and ended on a thread of their own, for two reasons. Ctrl-C reaches the main thread alone, so a
    worker that exists is always recorded. And the kernel ends a worker with the *thread* that started it: that thread
    lasts until :meth:`close`, until the process ends, or until exec replaces it.
    """

    def __init__(self) -> None:
        self.wake = above_stdio(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.done = above_stdio(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.own_pidfd = above_stdio(os.pidfd_open(os.getpid()))
        self.child: _Child | None = None
        self._thread = SerialThread("zero_opt worker starter")

    def start_child(self, start: Callable[[], _Child]) -> _Child:
        """The worker that runs; if none does, the one that ``start`` starts."""

        def started() -> _Child:
            if self.child is None:
                self.child = start()
            return self.child

        return self._on_thread(started)

    def end_child(self) -> str:
        """End the worker, if one runs; how it ended."""
        return self._on_thread(self._end)

    def _end(self) -> str:
        child, ended = self.child, ""
        if child is not None:
            ended = child.end()
            self.child = None
        return ended

    def _on_thread(self, call: Callable[[], _T]) -> _T:
        """Interrupted, the call goes on, and the next one comes after it."""
        try:
            result: _T = self._thread.submit(call).result(_CALL_S)
        except TimeoutError:
            raise WorkerFailed(f"a worker process has not been started or ended within {_CALL_S:.0f} s") from None
        return result

    def close(self) -> None:
        """End the worker, and let go of everything."""
        if not self._thread.runs:
            self._release()
            return
        released = self._thread.submit(self._release)
        self._thread.close()
        if not self._thread.is_current:  # garbage is collected on any thread
            with contextlib.suppress(TimeoutError):
                released.result(_CALL_S)

    def _release(self) -> None:
        try:
            self._end()
        except WorkerFailed as error:
            log.warning("%s", error)
        for fd in (self.wake, self.done, self.own_pidfd):
            close_own(fd)


class WorkerProcess:
    """An arena, and a worker that steps what is in it; a dead or stuck one is replaced.

    Attributes:
        arena: the control area, then whatever :meth:`extend` has added. control: its control area.
        deaths: how many workers have been replaced. threads: how many each has.
    """

    def __init__(self, policy: WorkerOffload, cores: Sequence[int], threads: int) -> None:
        self._policy, self._cores, self.threads = policy, tuple(cores), threads
        self._pid = os.getpid()
        nbytes = control_nbytes(threads)
        try:
            with memory_errors(nbytes, "the control area of this rank's worker"):
                self.arena = GrowingArena.create("zero_opt worker", nbytes)
                self._handles = _Handles()
        except PermissionError as error:  # a container's seccomp profile
            raise WorkerFailed(
                "the system does not let this process make what a worker needs, memfd_create and pidfd_open "
                f"({error}); allow them, or leave out offload="
            ) from error
        self._connect()
        self._close = weakref.finalize(self, self._handles.close)
        self.deaths = 0
        self._fruitless = 0
        self._at_death: tuple[int, ...] = ()

    def _connect(self) -> None:
        arena = self.arena
        lanes = _LANES_PER_THREAD * self.threads
        self.control = native.Control(arena.address, arena.bytes.numel(), lanes=lanes, max_runs=_MAX_RUNS)

    def require_not_forked(self) -> None:
        """Raise WorkerFailed in a process that was forked from the one that made this."""
        if os.getpid() != self._pid:
            raise WorkerFailed(
                f"this optimizer's worker belongs to process {self._pid}, of which this one ({os.getpid()}) is a fork; "
                "construct the optimizer in the process that calls step()"
            )

    # -- memory -------------------------------------------------------------------------------------------------------

    def extend(self, nbytes: int) -> int:
        """Add memory to the arena, all zero, and return where in the arena it begins. No step may be under way.

        The arena is mapped anew: views of it are to be made again. :meth:`start` is to be called.

        Raises:
            OutOfMemory: there is not so much; nothing has changed. WorkerFailed: the arena's descriptor is closed.
        """
        self.require_not_forked()
        what = "this rank's worker (optimizer state and gradients)"
        require_memory(nbytes, what)
        self._handles.end_child()
        start = self.arena.bytes.numel()
        with memory_errors(nbytes, what), _growing():
            self.arena.grow(start + nbytes)
        self._connect()
        return start

    # -- the process --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a worker unless one runs, and return when it is ready: it has finished what it found undone.

        One that is killed meanwhile is replaced; one that ends by itself would do so again.

        Raises:
            WorkerFailed: it does not become ready; the message has what it said. OutOfResources: no file descriptors.
        """
        self.require_not_forked()
        child, waited, killed = self._handles.child or self._spawn(), 0.0, 0
        while self.control.generation == child.generation:
            before = time.monotonic()
            dead = child.dead(_READY_LOOK_MS)
            waited += min(time.monotonic() - before, _WAIT_SLICE_S)
            if not dead and waited <= _READY_S:
                continue
            message = self._obituary(child, "did not become ready")
            killed += 1
            if not dead or not child.was_killed or killed >= self._policy.max_deaths:
                raise (WorkerDied if child.was_killed and dead else WorkerFailed)(message)
            self.deaths += 1
            log.warning("%s; a successor is started (%d so far)", message, self.deaths)
            child, waited = self._spawn(), 0.0

    def _spawn(self) -> _Child:
        handles, control = self._handles, self.control
        fds = (self.arena.fd, handles.wake, handles.done, handles.own_pidfd)
        arguments = [str(native.__file__), *map(str, [*fds, self.threads, *self._cores])]
        return handles.start_child(lambda: _Child(arguments, fds, control.generation))

    def _obituary(self, child: _Child, what: str) -> str:
        """End a worker, and say how it ended and what it said."""
        said = self.control.error or child.said()
        hint = f"; {CLOSED_BY_PROGRAM}" if os.strerror(errno.EBADF) in said else ""
        return f"worker process {child.pid} {what} ({self._handles.end_child()})" + (f": {said}{hint}" if said else "")

    def _replace(self, child: _Child, what: str) -> None:
        """Make sure that a worker is gone, and start a successor, which finishes the step.

        Raises:
            WorkerDied: too many have gone at the same place.
        """
        message = self._obituary(child, what)
        self.deaths += 1
        progress = self.control.progress
        self._fruitless = self._fruitless + 1 if progress == self._at_death else 1
        self._at_death = progress
        if self._fruitless >= self._policy.max_deaths:
            deaths, self._fruitless = self._fruitless, 0
            raise WorkerDied(
                f"{message}; {deaths} in a row have not got on with the step that is pending. "
                "State is intact, and parameters may have a part of the step: opt.flush(), on every rank, tries again"
            )
        log.warning("%s; a successor finishes the step (%d so far)", message, self.deaths)
        self._spawn()

    # -- steps --------------------------------------------------------------------------------------------------------

    def submit(self, batches: Sequence[RunBatch], *, flush_denormals: bool = False, past_caches: bool = False) -> int:
        """Have the worker take a step; returns its sequence number.

        Raises:
            ValueError: something that the worker cannot do, before anything was submitted. WorkerFailed: it cannot be
                woken, since the program has closed its descriptors.
        """
        self.require_not_forked()
        wake = self._handles.wake
        with _waking():
            return self.control.submit(batches, wake, flush_denormals=flush_denormals, past_caches=past_caches)

    def draft(self, batches: Sequence[RunBatch], *, flush_denormals: bool = False) -> int:
        """Have the worker make runs from bank to bank, on any one thread at a time; returns ``control.drafted``.

        One that writes where an earlier one does takes a ``control.void_drafts()`` in between, or that one to be done.

        Raises:
            ValueError: something that the worker cannot do. OverflowError: no room until it has done more.
        """
        with _waking():
            return self.control.draft(batches, self._handles.wake, flush_denormals=flush_denormals)

    def draft_sums(self, grads: Sequence[Tensor], sums: Sequence[Tensor], *, flush_denormals: bool = False) -> int:
        """Have the worker sum squares, among the drafts, for :func:`grad_squares`; returns ``control.drafted``.

        Args:
            grads: fp32, bf16 or fp16, 1-D, in the arena. sums: where their sums go, likewise.

        Raises:
            OverflowError: no room until it has done more.
        """
        arrays = [(grad.data_ptr(), DTYPE_NAMES[grad.dtype], grad.numel()) for grad in grads]
        squares = [array.data_ptr() for array in sums]
        with _waking():
            return self.control.draft_sums(arrays, squares, self._handles.wake, flush_denormals=flush_denormals)

    def wait_drafts(self, drafts: int) -> None:
        """As :meth:`wait`, until so many drafts have been made, or were void."""
        self._watch(lambda control, *how: control.wait_drafts(drafts, *how))

    def wait(self, sequence: int) -> None:
        """Return when a step is done, however many workers it takes.

        Raises:
            WorkerDied: they die, or get stuck, without getting on. WorkerFailed: no successor can be started.
            OutOfResources: there are no file descriptors for one. KeyboardInterrupt: within about 0.1 s. The step is
            not lost, and may be waited for again.
        """
        self._watch(lambda control, *how: control.wait(sequence, *how))

    def _watch(self, wait: Callable[..., str]) -> None:
        """Wait for a worker by a call of the control area's, replacing those that die or get stuck."""
        self.require_not_forked()
        idle = 0.0
        seen: tuple[int, ...] = ()
        while True:
            child = self._handles.child or self._spawn()
            before = time.monotonic()
            state = wait(self.control, self._handles.done, child.pidfd, _WAIT_SLICE_S)
            if state == "done":
                return
            progress = self.control.progress
            # What this process has not watched does not count: it may have been stopped itself.
            idle = idle + min(time.monotonic() - before, _WAIT_SLICE_S) if progress == seen else 0.0
            seen = progress
            if state == "dead":
                self._replace(child, "died")
                idle = 0.0
            elif idle >= self._policy.hang_timeout:
                self._replace(child, f"made no progress for {self._policy.hang_timeout:g} s and was killed")
                idle = 0.0

    def close(self) -> None:
        """End the worker. The arena stays as long as there are tensors over it."""
        self._close()
        self.arena.close()

    def __reduce__(self) -> Any:
        raise WorkerFailed("a worker process cannot be copied")
