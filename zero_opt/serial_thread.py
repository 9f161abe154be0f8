"""One background thread that runs submitted calls in order."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


def _run(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, call, arguments = job
        try:
            result = call(*arguments)
        except BaseException as error:  # handed to whoever waits for the future
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        # Do not keep the last job's tensors, or its result, alive while waiting for the next one.
        del job, future, call, arguments


class SerialThread:
    """Runs calls one after the other on a daemon thread, so an exchange that a dead peer blocks cannot block exit.

    ``concurrent.futures.ThreadPoolExecutor`` joins its threads at interpreter exit, which would.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = name
        self._stop = weakref.finalize(self, self._jobs.put, None)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue ``call(*arguments)``; its result or exception arrives in the future."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put((future, call, arguments))
        return future

    def close(self) -> None:
        """Let the thread end once it has run what is queued; does not wait for it."""
        self._stop()
