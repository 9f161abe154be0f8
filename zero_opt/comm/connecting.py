"""How ranks make the connections of an optimizer: all ranks do, or none does.

[Note: a rank that cannot connect]
A rank may lack descriptors, threads or memory. It reports what it can tell beforehand before the others begin; see
:func:`rendezvous.common_name`. It writes a later failure to the store of the user's process group. Ranks that wait
there for its address look for that failure, and at the end all ranks meet there. A rank that is killed meanwhile writes
nothing, so both waits are bounded. gloo by itself waits for a missing rank for the whole timeout of the group, 30
minutes by default, and ends the process where it gets no thread.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import OutOfResources, ProcessGroupError, ZeroOptError, error_of_rank, name_and_text
from ..system.threads import THREAD_LIMIT, BackgroundThreads
from . import rendezvous

# Its private parts carry no types.
_c10d: Any = dist.distributed_c10d

# Descriptors of one gloo group besides a socket per other rank, and its threads.
_OWN_DESCRIPTORS, _THREADS = 4, 3
# What the rest of an optimizer and its first step open: memory shared with each rank of the host, files, queues.
_SPARE_DESCRIPTORS, _SPARE_THREADS = 32, 8
# A rank that waits asks the store at intervals that grow from the first to the second of these, in seconds.
_FIRST_LOOK_S, _LOOK_S = 0.001, 0.1
# Seconds that ranks have to connect, and seconds more for each of them, however long the group's timeout is.
_CONNECT_S, _CONNECT_RANK_S = 30.0, 0.25
_DESCRIPTOR_LIMIT = "file descriptors: 'ulimit -n', docker's --ulimit nofile"
# Which limit a message of the operating system or of gloo is about.
_LIMITS = {
    "Too many open files": _DESCRIPTOR_LIMIT,
    "new thread": THREAD_LIMIT,
    "Resource temporarily unavailable": THREAD_LIMIT,
}
# Seconds within which threads end that have nothing to wait for.
_ENDING_S = 5.0
_FAILED, _COUNT, _ALL = "failed", "count", "all"
_numbers = itertools.count()


def require_room(world_size: int, groups: int) -> None:
    """Raise OutOfResources unless this process may open the descriptors and start the threads of so many groups."""
    needed = groups * (world_size - 1 + _OWN_DESCRIPTORS) + _SPARE_DESCRIPTORS
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = _open_descriptors()
    if limit != resource.RLIM_INFINITY and taken + needed > limit:
        raise OutOfResources(
            f"connections to the other ranks ({world_size - 1}) need about {needed} file descriptors, but this process "
            f"has {taken:,} open and may have {limit:,}; raise the limit before you start it, "
            + _raised(taken + needed, most)
        )
    _require_threads(groups * _THREADS + _SPARE_THREADS)


def require_descriptors(count: int, purpose: str) -> None:
    """Raise OutOfResources unless this process may open so many more descriptors; ``purpose`` begins the message."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise OutOfResources(
            f"{purpose} needs {count} file descriptors ({error.strerror}); raise the limit of {_DESCRIPTOR_LIMIT}"
        ) from error
    finally:
        for fd in opened:
            os.close(fd)


def _raised(needed: int, most: int) -> str:
    """How a user raises the limit of descriptors, given the hard limit."""
    if most == resource.RLIM_INFINITY:
        most = max(needed, 4096)
    if needed > most:
        return f"which only root can: the hard limit is {most:,} (/etc/security/limits.conf, docker's --ulimit nofile)"
    return f"with 'ulimit -n {min(max(needed, 4096), most)}' or docker's --ulimit nofile"


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux; or not even a descriptor for this
        return 0


def _require_threads(count: int) -> None:
    """Start so many threads at once, and end them."""
    over, probes, started = threading.Event(), BackgroundThreads(), 0
    try:
        for _ in range(count):
            probes.start(threading.Thread(target=over.wait, name="zero_opt probe"))
            started += 1
    except RuntimeError as error:
        raise OutOfResources(f"this process needs {count} more threads and got {started}: {error}") from error
    finally:
        over.set()
        probes.join(_ENDING_S)


class Connecting:
    """The construction of one optimizer's groups, on one rank.

    Attributes:
        name: prefix of the groups' names; the same on every rank, and never used before.
        number: counts the optimizers of this process, for logs and torch's flight recorder.
        patience_s: seconds that ranks may take to publish their addresses, and to make their groups.
    """

    def __init__(self, parent: dist.ProcessGroup, exchange: rendezvous.Exchanging, groups: int) -> None:
        """Come together with the other ranks. Collective.

        Raises:
            OutOfResources: a rank, maybe this one, has no room for so many groups. Others as for
                :func:`rendezvous.common_name`.
        """
        obstacle = None
        try:
            require_room(parent.size(), groups)
        except OutOfResources as error:
            obstacle = error
        self.name = f"zero_opt/{rendezvous.common_name(parent, exchange, obstacle)}"
        self._board = _c10d.PrefixStore(f"{self.name}/made", _c10d._get_default_store())
        self.number = next(_numbers)
        self._rank, self._world_size = dist.get_rank(parent), parent.size()
        self.patience_s = _CONNECT_S + _CONNECT_RANK_S * self._world_size

    def addresses(self, purpose: str) -> Any:
        """Return the store in which the ranks find each other for one of the groups."""
        return _Addresses(_c10d.PrefixStore(f"{self.name}/{purpose}/addresses", _c10d._get_default_store()), self)

    def patience(self, timeout: timedelta) -> timedelta:
        """Return how long ranks may take to connect, given how long a collective may take."""
        return min(timeout, timedelta(seconds=self.patience_s))

    def look(self) -> None:
        """Raise the error of another rank that cannot connect, if there is one."""
        if self._board.check([_FAILED]):
            rank, name, message = json.loads(self._board.get(_FAILED))
            if rank != self._rank:
                raise error_of_rank(rank, name, message)

    def meet(self) -> None:
        """Wait until all ranks have made their groups.

        Raises:
            ProcessGroupError: one has not, in time. ZeroOptError: one cannot.
        """
        if self._board.add(_COUNT, 1) == self._world_size:
            self._board.set(_ALL, "")
        wait_for(self._board, [_ALL], self)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot connect, unless another has said so before."""
        said = json.dumps([self._rank, *name_and_text(error)])
        with suppress(RuntimeError):  # no store, no other rank
            self._board.compare_set(_FAILED, "", said)


def wait_for(store: Any, keys: list[str], connecting: Connecting) -> None:
    """Wait until a store has the keys.

    torch's own wait logs a warning each time that it ends without them.

    Raises:
        ProcessGroupError: it does not get them in time. ZeroOptError: a rank cannot connect.
    """
    deadline, pause_s = time.monotonic() + connecting.patience_s, _FIRST_LOOK_S
    while not store.check(keys):
        connecting.look()
        if time.monotonic() > deadline:
            raise ProcessGroupError(
                f"not all ranks have connected within {connecting.patience_s:.0f} s: one has ended or is stopped; "
                "look at the ranks' logs, and restart all"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)


class _Addresses(_c10d.Store):  # type: ignore[misc]
    """A store that ends the wait for a rank that cannot connect."""

    def __init__(self, store: Any, connecting: Connecting) -> None:
        super().__init__()
        self._store, self._connecting = store, connecting

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002  (the group's)
        wait_for(self._store, keys, self._connecting)


@contextmanager
def made_by_all(connecting: Connecting | None) -> Iterator[list[Any]]:
    """A context in which this rank makes an optimizer's groups and adds them to the list.

    It is left once all ranks have made theirs.

    Raises:
        OutOfResources, ProcessGroupError: a rank cannot make its groups; on every rank. Groups made so far are closed.
    """
    made: list[Any] = []
    try:
        yield made
        if connecting is not None:
            connecting.meet()
    except BaseException as error:
        for group in made:  # which also gives back the descriptors and threads that it takes to tell the others
            group.close()
        if connecting is None:
            raise
        found = _found(error, connecting)
        connecting.fail(found)
        raise found from (None if found is error else error)


def _found(error: BaseException, connecting: Connecting) -> BaseException:
    """Return what an error while groups are made means: another rank's error, if that came first, else this one's."""
    if isinstance(error, ZeroOptError) or not isinstance(error, (RuntimeError, MemoryError, OSError)):
        return error
    with suppress(dist.DistError):  # the store is what fails
        try:
            connecting.look()
        except ZeroOptError as elsewhere:
            return elsewhere
    text = (str(error) or type(error).__name__).splitlines()[0]
    for sign, limit in _LIMITS.items():
        if sign in text:
            return OutOfResources(f"cannot connect to the other ranks; raise the limit of {limit} ({text})")
    if any(sign in text for sign in ("refused", "reset", "connectFullMesh")):
        text = f"one of them ended meanwhile, and its own output says why; torchrun restarts all ({text})"
    return ProcessGroupError(f"cannot connect to the other ranks: {text}")
