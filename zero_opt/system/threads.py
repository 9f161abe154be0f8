"""Background threads, each listed until it is dead.

[Note: threads at exit]
Before Python 3.14, a thread that asks for the interpreter's lock while the interpreter is finalized is ended by
pthread_exit, which unwinds its stack. Where that meets a C++ destructor the process aborts, whatever its exit status
was to be: "terminate called without an active exception". Torch takes the lock back in destructors: at the end of every
operator and of ``Work.wait``, and when a tensor or a Work is freed. A thread whose function has returned still frees
local variables, so it stays listed until ``Thread.is_alive`` is false. The exit waits for all listed threads. Native
code puts a thread that does not end in time to sleep where it would abort the process.
"""

from __future__ import annotations

import math
import sys
import threading
import time

from ..errors import OutOfResources
from .extension import native, native_available
from .interrupts import uninterrupted

# Which limits bound the number of threads.
THREAD_LIMIT = (
    "processes and threads: 'ulimit -u', pids.max of the container; or of memory, where their stacks lie: 'ulimit -v'; "
    "or start fewer (OMP_NUM_THREADS, loaders)"
)


class BackgroundThreads:
    """Daemon threads that were started here and are not dead."""

    def __init__(self) -> None:
        self._listed: dict[threading.Thread, float] = {}  # until when each is waited for, by the monotonic clock
        self._holds = False

    @uninterrupted()  # one that runs is listed
    def start(self, thread: threading.Thread) -> None:
        """Start a thread as a daemon, and list it.

        Raises:
            OutOfResources: the operating system refuses a thread. RuntimeError: the interpreter is ending.
        """
        if sys.is_finalizing():  # before Python 3.12, start() would wait for a thread that cannot run any more
            raise RuntimeError("can't start a thread at interpreter shutdown")
        thread.daemon = True
        try:
            thread.start()
        except RuntimeError as error:
            if "shutdown" in str(error):
                raise
            running = f"Python has {threading.active_count()} threads"
            raise OutOfResources(f"{error} ({running}); raise the limit of {THREAD_LIMIT}") from error
        self._listed[thread] = math.inf
        self.alive()
        if self._holds:  # what else ends with the interpreter has begun it
            self.hold()

    def alive(self) -> list[threading.Thread]:
        """Return the threads that are not dead, and drop the others from the list."""
        for thread in list(self._listed):
            if not thread.is_alive():
                self._listed.pop(thread, None)
        return list(self._listed)

    def leave(self, thread: threading.Thread, at: float = 0.0) -> None:
        """Let :meth:`join` wait for a thread no longer than until ``at``, by the monotonic clock."""
        if thread in self._listed:
            self._listed[thread] = at

    def join(self, patience_s: float) -> list[threading.Thread]:
        """Wait at most ``patience_s`` seconds until all are dead; returns those that are not."""
        deadline = time.monotonic() + patience_s

        def wait_s(thread: threading.Thread) -> float:
            return min(deadline, self._listed.get(thread, 0.0)) - time.monotonic()

        while waited_for := [thread for thread in self.alive() if wait_s(thread) > 0]:  # a thread may start another
            for thread in waited_for:
                thread.join(max(wait_s(thread), 0.0))
        return self.alive()

    def hold(self) -> None:
        """Keep threads that are still alive, and those that begin later, from aborting the process; call this last.

        See [Note: threads at exit].
        """
        self._holds = True
        if native_available():
            native.hold_threads([thread.ident for thread in self.alive() if thread.ident is not None])
