"""How ranks make the connections of an optimizer: all ranks do, or none does.

[Note: a rank that cannot connect]
A rank may lack descriptors, threads or memory. It reports what it can tell beforehand before the others begin; see
:class:`Meeting`. It writes a later failure to the store of the user's process group. Ranks that wait there for its
address look for that failure, and at the end all ranks meet there. A rank that is killed meanwhile writes nothing, so
both waits are bounded. gloo by itself waits for a missing rank for the whole timeout of the group, 30 minutes by
default, and ends the process where it gets no thread.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ..errors import OutOfResources, ProcessGroupError, ZeroOptError
from ..system.background_thread import SerialThread
from ..system.failures import on_failure
from ..system.future import Future
from ..system.limits import NO_DESCRIPTORS, limit_in
from ..system.threads import THREAD_LIMIT, BackgroundThreads
from ..system.waiting import until
from .backend_errors import first_line
from .lazy_gloo import INTERFACES, partners
from .parent import Parent
from .rendezvous import LOOK_AFTER_S, PAUSE_RANK_S, Meeting, Patience
from .store import STORE_ERRORS, StoreCalls, c10d, default_store, require_room_in_file
from .store_keys import missing, values
from .waits_beside import outcome, submitted

# Descriptors of one gloo group besides a socket per other rank, and its threads.
_OWN_DESCRIPTORS, _THREADS = 4, 3
# What the rest of an optimizer and its first step open: memory shared with each rank of the host, files, queues.
_SPARE_DESCRIPTORS, _SPARE_THREADS = 32, 8
# Seconds that ranks have to connect, and seconds more for each of them, however long the group's timeout is.
_CONNECT_S, _CONNECT_RANK_S = 30.0, 0.25
# Seconds within which a rank that has ended is found, or another one has said so; and all have heard of an error.
_FOUND_S = 3.0
# What the operating system or gloo says of a thread that cannot be started.
_NO_THREAD = ("new thread", "Resource temporarily unavailable")
# What gloo says of a connection to a rank that has ended.
_BROKEN = ("refused", "reset", "connectFullMesh")
# Addresses that lead to the host itself, as gloo writes them.
_LOOPBACK = ("[127.", "[::1]", "[::ffff:127.")
# Seconds within which threads end that have nothing to wait for.
_PROBES_END_S = 5.0
# The key under which ranks are counted that leave because of an error.
_HEARD = "heard"
_numbers = itertools.count()


def require_room(world_size: int, groups: int) -> None:
    """Raise OutOfResources unless this process has room for so many groups: descriptors, threads, the store's file."""
    descriptors = groups * (len(partners(0, world_size)) + _OWN_DESCRIPTORS) + _SPARE_DESCRIPTORS
    require_descriptors(descriptors, f"connections to the other ranks ({world_size - 1}) need about")
    _require_threads(groups * _THREADS + _SPARE_THREADS)
    require_room_in_file(world_size)


def require_descriptors(count: int, purpose: str) -> None:
    """Raise OutOfResources unless this process may open so many more descriptors; ``purpose`` begins the message."""
    (limit, most), taken, opened = resource.getrlimit(resource.RLIMIT_NOFILE), _open_descriptors(), list[int]()
    try:
        for _ in range(count):
            opened.append(os.open(os.sep, os.O_RDONLY | os.O_CLOEXEC))  # which a sandbox has too
    except OSError as error:
        raise OutOfResources(
            f"{purpose} {count} file descriptors, but this process has {taken:,} open and may have {limit:,} "
            f"({error.strerror}); raise the limit before you start it, {_how_to_raise(taken + count, most)}"
        ) from error
    finally:
        for fd in opened:
            os.close(fd)


def _how_to_raise(needed: int, most: int) -> str:
    """Return how a user raises the limit of descriptors, given the hard limit."""
    if most == resource.RLIM_INFINITY:
        most = max(needed, 4096)
    if needed > most:
        return f"which only root can: the hard limit is {most:,} (/etc/security/limits.conf, docker's --ulimit nofile)"
    return f"with 'ulimit -n {min(max(needed, 4096), most)}' or docker's --ulimit nofile"


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError as error:  # not even a descriptor for this; or not Linux
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if error.errno in NO_DESCRIPTORS else 0


def _require_threads(count: int) -> None:
    """Start so many threads at once, and end them."""
    over, probes, started = Future[None](), BackgroundThreads(), 0
    try:
        for _ in range(count):
            probes.start(threading.Thread(target=over.wait, name="zero_opt probe"))
            started += 1
    except RuntimeError as error:
        raise OutOfResources(f"this process needs {count} more threads and got {started}: {error}") from error
    finally:
        over.set_result(None)
        probes.join(_PROBES_END_S)


class Connecting(Meeting):
    """The construction of one optimizer's groups, on one rank.

    Attributes:
        name: prefix of the groups' names; the same on every rank, and never used before.
        number: counts the optimizers of this process, for logs and torch's flight recorder.
        patience_s: seconds that ranks may take to publish their addresses, and to make their groups.
    """

    def __init__(self, parent: dist.ProcessGroup | Parent, groups: int, patience: Patience) -> None:
        """Come together with the other ranks. Collective.

        Raises:
            OutOfResources: a rank, maybe this one, has no room for so many groups. Others as for :meth:`Meeting.come`.
        """
        super().__init__(parent, patience)
        self._world_size, self._given_up = len(self._parent.ranks), False
        try:
            self.come(partial(require_room, self._world_size, groups))
        except OutOfResources:
            self.wait_until_heard()
            raise
        self.number = next(_numbers)
        self.patience_s = _CONNECT_S + _CONNECT_RANK_S * self._world_size

    def addresses(self, purpose: str) -> Any:
        """Return the store in which the ranks find each other for one of the groups."""
        return _Addresses(default_store(f"{self.name}/{purpose}/addresses"), self, purpose)

    def connected(self, make: Callable[[], Any]) -> Any:
        """Return the group that ``make`` returns once it is connected; calls it on a thread beside this one.

        gloo tries for minutes to connect to a rank that has ended, and cannot be interrupted. Whatever ends the wait
        here ends the thread's waits in Python too: one that lasts into the interpreter's exit crashes the process,
        since gloo's frames are below it. See [Note: threads at exit].

        Raises:
            ProcessGroupError: it takes too long. ZeroOptError: a rank cannot connect, is stopped, or has ended.
        """
        thread, begun = SerialThread("zero_opt connect"), time.monotonic()

        def look() -> None:
            self.look()
            if time.monotonic() - begun > 2 * self.patience_s:  # for the addresses, and for the connections
                raise ProcessGroupError(
                    f"not all ranks have connected within {2 * self.patience_s:.0f} s: one has ended or is stopped, or "
                    "two hosts cannot reach each other; look at the ranks' logs, and restart all"
                )

        try:
            with on_failure(self._give_up):
                return outcome(submitted(thread, make), lambda: look)
        finally:
            thread.close()

    def _give_up(self) -> None:
        self._given_up = True

    def require_wanted(self) -> None:
        """Raise ProcessGroupError once the thread that :meth:`connected` is called on has left it."""
        if self._given_up:
            raise ProcessGroupError("this rank has given up connecting")

    def wait_for(self, store: Any, keys: Sequence[str], look: Callable[[], None]) -> list[bytes]:
        """Return the values of keys, of which each ends with the number of the rank that writes it, once all are there.

        torch's own wait logs a warning each time that it ends without them.

        Args:
            look: called now and then; raises why this rank waits in vain.

        Raises:
            ProcessGroupError: they are not there in time.
        """
        self._wait(lambda: self.ask(store.check, list(keys)), store, keys, look)
        return self.ask(values, store, keys)

    def _wait(self, done: Callable[[], bool], store: Any, keys: Sequence[str], look: Callable[[], None]) -> None:
        due = LOOK_AFTER_S

        def look_around(waited: float) -> None:
            nonlocal due
            look()
            if waited >= due:
                due = 2 * waited
                if (lost := self.lost()) is not None:
                    self.look()  # it may have ended because of another, which it has told before
                    raise lost

        if not until(done, self.patience_s, look_around, PAUSE_RANK_S * self._world_size):
            late = [key.rpartition("/")[2] for key in missing(partial(self.ask, store.check), keys)]
            if not late:  # the last has come since
                return
            who, which = f"rank {', '.join(late)}", "one of them" if len(late) > 1 else "it"
            raise ProcessGroupError(
                f"not all ranks have connected within {self.patience_s:.0f} s. Missing: {who}: {which} has ended or is "
                "stopped, or two hosts cannot reach each other; look at the ranks' logs, and restart all"
            )

    def wait_until_heard(self) -> None:
        """Wait a little until all ranks leave because of an error: the end of this one may be that of the store."""
        with closing(StoreCalls()) as ask, suppress(*STORE_ERRORS):
            ask(self._place.add, _HEARD, 1)
            until(lambda: ask(self._place.add, _HEARD, 0) == self._world_size, _FOUND_S)

    def meet(self, purpose: str = "made", look: Callable[[], None] | None = None) -> None:
        """Wait until all ranks have made their groups, or what else has a purpose.

        Args:
            look: as for :meth:`wait_for`; by default looks at the other ranks.

        Raises:
            ProcessGroupError: one has not, in time. ZeroOptError: one cannot.
        """
        made, ranks = default_store(f"{self.name}/{purpose}"), [f"{rank}" for rank in range(self._world_size)]
        self.ask(made.set, f"{self.rank}", "")
        self.ask(made.add, "count", 1)
        self._wait(lambda: self.ask(made.add, "count", 0) == len(ranks), made, ranks, look or self.look)


class _Addresses(c10d.Store):  # type: ignore[misc]
    """A store of addresses that ends the wait for a rank that does not connect, and for the store."""

    def __init__(self, store: Any, connecting: Connecting, purpose: str) -> None:
        super().__init__()
        self._store, self._connecting, self._purpose = store, connecting, purpose
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._connecting.ask(self._store.set, key, value)
        self._known[key] = value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def add(self, key: str, amount: int) -> int:
        return int(self._connecting.ask(self._store.add, key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._connecting.ask(self._store.check, keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002  (the group's)
        unknown = [key for key in keys if key not in self._known]
        if unknown:
            look = self._connecting.require_wanted  # the thread that waits for the connections looks at the ranks
            self._known.update(zip(unknown, self._connecting.wait_for(self._store, unknown, look), strict=True))

    def meet(self) -> None:
        """Wait until all ranks have an address: gloo's wait for a rank to connect cannot be ended."""
        self._connecting.meet(f"{self._purpose}/listens", self._connecting.require_wanted)


@contextmanager
def made_by_all(connecting: Connecting) -> Iterator[list[Any]]:
    """A context in which this rank makes an optimizer's groups and adds them to the list.

    It is left once all ranks have made theirs.

    Raises:
        OutOfResources, ProcessGroupError: a rank cannot make its groups; on every rank. Groups made so far are closed.
    """
    made: list[Any] = []
    try:
        yield made
        connecting.meet()
    except BaseException as error:
        meaning = _meaning_of(error, connecting)
        with suppress(RuntimeError):  # before a connection closes, which the other ranks would report instead
            connecting.leave(meaning)
        for group in made:
            group.close()
        connecting.leave(meaning)  # if that took descriptors or threads that the groups have given back
        if isinstance(meaning, (OutOfResources, ProcessGroupError)):
            connecting.wait_until_heard()
        raise meaning from (None if meaning is error else error)
    finally:
        connecting.ask.close()
    connecting.ask = StoreCalls()  # for ranks that connect on first use; its thread starts with the first call


def _meaning_of(error: BaseException, connecting: Connecting) -> BaseException:
    """Return what an error while groups are made means: another rank's error, if that came first, else this one's."""
    if isinstance(error, ZeroOptError) or not isinstance(error, (RuntimeError, MemoryError, OSError)):
        return connecting.meaning(error)
    text = first_line(error)
    limit = THREAD_LIMIT if any(sign in text for sign in _NO_THREAD) else limit_in(text)
    broken = limit is None and any(sign in text for sign in _BROKEN)
    with suppress(dist.DistError):  # the store is what fails
        try:
            until(lambda: False, _FOUND_S if broken else 0.0, lambda _: connecting.look())
        except ZeroOptError as elsewhere:
            return connecting.meaning(elsewhere)
    if broken and (lost := connecting.lost()) is not None:
        return lost
    if limit is not None:
        return OutOfResources(f"cannot connect to the other ranks; raise the limit of {limit} ({text})")
    if broken and connecting.several_hosts and any(sign in text for sign in _LOOPBACK):
        text = (
            f"gloo knows an address of a rank that only its own host can reach: set {INTERFACES} on every host to the "
            f"network interface that reaches the others ({text})"
        )
    elif broken:
        text = f"one of them ended meanwhile, and its own output says why; torchrun restarts all ({text})"
    return ProcessGroupError(f"cannot connect to the other ranks: {text}")
