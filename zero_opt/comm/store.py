"""The store that the process group was made with: calls that end, though its server may be the rank that is missing."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import OutOfResources, PeerLost
from ..system.background_thread import SerialThread
from ..system.future import Future
from ..system.limits import FILE_SIZE_LIMIT, limit_in
from .backend_errors import first_line
from .waits_beside import submitted

# torch's own functions for groups; the private ones carry no types.
c10d: Any = dist.distributed_c10d


def _let_go_of_default_group() -> None:
    """Import torch.distributed.nn.functional, and take the default group out of its functions' default arguments.

    torch's optimizers import this module when the first is made. Its functions' default arguments then capture the
    default group, whose threads outlive destroy_process_group(), and may abort the exit. Without a group at the time of
    the import they are None, which means the same.
    """
    module = importlib.import_module("torch.distributed.nn.functional")
    for function in vars(module).values():
        defaults = isinstance(function, FunctionType) and function.__defaults__
        if defaults and any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


if dist.is_available():
    _let_go_of_default_group()

# Seconds that the store may take to answer, and after which a thread that waits for it sees that nothing needs it.
_ANSWER_S, _SLICES = 60.0, 240
_ADVICE = (
    "rank 0, or the launcher, serves it (with init_method='file://...', it is that file): look at whether that runs "
    "and its host is up, and restart all ranks"
)
# What a call of the store raises where the store fails.
STORE_ERRORS = (PeerLost, OutOfResources)
_Answer = TypeVar("_Answer")
# Bytes that an optimizer adds to a store's file, per rank: twice as many as have been seen.
_BYTES_OF_RANK = 8 << 10
_STORE = "the process group's store"


def is_of_store(error: BaseException) -> bool:
    """Return whether an error says that the store does not answer this rank. It may answer others."""
    return isinstance(error, PeerLost) and str(error).startswith(_STORE)


def default_store(prefix: str) -> Any:
    """Return the default group's store, with a prefix for its keys."""
    return c10d.PrefixStore(prefix, c10d._get_default_store())


def require_room_in_file(world_size: int) -> None:
    """Raise OutOfResources if the default store is a file, and this process may not make it as long as ranks need it.

    Otherwise torch would write part of a record, and every rank that reads the store would wait forever for the rest.
    """
    store, most = c10d._get_default_store(), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    path = getattr(getattr(store, "_underlying_non_prefix_store", store), "path", None)
    needed = world_size * _BYTES_OF_RANK
    with contextlib.suppress(OSError):
        if isinstance(path, str) and most != resource.RLIM_INFINITY and os.path.getsize(path) + needed > most:
            raise OutOfResources(
                f"{_STORE} is a file that may need {needed:,} bytes more, and no file of this process may be longer "
                f"than {most:,} bytes; raise the limit of {FILE_SIZE_LIMIT}"
            )


class StoreCalls:
    """A thread that calls the store, so that the caller need not wait for it without end.

    A call raises one of ``STORE_ERRORS``, or what the call itself raises.
    """

    def __init__(self) -> None:
        self._thread = SerialThread("zero_opt store")
        self._silent = False

    def __call__(self, call: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Return what a call of the store returns.

        Raises:
            PeerLost: the store does not answer, or its server has ended. OutOfResources: it is a file, and a limit of
                this process keeps it from being written or opened.
        """
        try:
            future: Future[_Answer] | None = None if self._silent else submitted(self._thread, call, *arguments)
            if future is not None and self._answered(future):
                return future.result(0)
            if self._thread.ended:
                raise PeerLost(f"{_STORE} is called no more, since this rank has given up waiting")
            self._silent = True
            self._thread.leave()
        except dist.DistError as error:
            text = first_line(error)
            limit = limit_in(text)
            if limit is not None:
                raise OutOfResources(f"{_STORE} fails in this process ({text}); raise the limit of {limit}") from error
            raise PeerLost(f"{_STORE} cannot be reached; {_ADVICE} ({text})") from error
        raise PeerLost(f"{_STORE} has not answered for {_ANSWER_S:.0f} s; {_ADVICE}")

    def _answered(self, future: Future[_Answer]) -> bool:
        """Wait for an answer until it is there, it takes too long, or the store is called no more."""
        slices = (future.wait(_ANSWER_S / _SLICES) for _ in range(_SLICES))
        return any(answered or self._thread.ended for answered in slices) and future.done()

    def close(self) -> None:
        """Call the store no more."""
        self._thread.close()
