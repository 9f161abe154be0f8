"""How many threads step in this process, unless the user sets the number.

[Note: a fair part of the cores]
The default is the number of cores that this process may use (its affinity, and the time that its cgroup grants),
divided by the ranks of the host that may use the same cores. torch's own count is an upper bound, since the user may
have set it, unless it is 1 because of ``OMP_NUM_THREADS=1``: launchers set that for every rank, however many cores
there are.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import ConfigError, ConfigTypeError
from ..field_checks import plain_number
from ..system.extension import native, native_available
from ..system.log import log

_UNLIMITED_THREADS = 1 << 20
# The most ranks that have ever told each other that they share the cores of this process, this one included.
_most_sharers = 1


def allowed_threads(requested: int) -> int:
    """Return ``requested``, but at most what the affinity and, with the extension, the cgroup's quota grant."""
    if not native_available():
        return max(min(requested, len(os.sched_getaffinity(0))), 1)
    return native.usable_threads(requested)


def fair_threads(allowed: int, sharers: int) -> int:
    """Return how many of the ``allowed`` threads each of the ``sharers`` ranks gets; at least 1."""
    return max(allowed // sharers, 1)


def torchrun_sharers() -> int:
    """Return how many ranks share the cores of this process, according to torchrun; 1 if torchrun did not start it."""
    return _sharers_of(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@functools.cache
def _sharers_of(local_world_size: str) -> int:
    """Return the ranks of this host, scaled down if this process may use fewer cores than the one that started it."""
    if not local_world_size.isdecimal():
        return 1
    own = there = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # the parent process has ended
        there = len(os.sched_getaffinity(os.getppid()))
    return max(round(int(local_world_size) * min(own / there, 1)), 1)


def meet_sharers(count: int) -> int:
    """Note that ``count`` ranks, this one included, share cores, as they have told each other.

    Returns:
        How many ranks share cores, including those that torchrun has started and that are in no group with this one.
    """
    global _most_sharers
    _most_sharers = max(_most_sharers, count)
    return max(count, torchrun_sharers())


def default_threads() -> int:
    """Return how many threads step by default; see [Note: a fair part of the cores]."""
    fair = fair_threads(allowed_threads(_UNLIMITED_THREADS), max(_most_sharers, torchrun_sharers()))
    own = torch.get_num_threads()
    if own == 1 and os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip() == "1":
        return fair
    return min(fair, own)


def checked_threads(threads: Any) -> int:
    """Return how many threads to ask for, given the user's number or ``None`` for the default.

    Raises:
        ConfigTypeError, ConfigError: not a positive integer, nor None.
    """
    if threads is None:
        return default_threads()
    threads = plain_number(threads)
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise ConfigTypeError(f"threads must be a positive integer or None, got {threads!r}")
    if threads < 1:
        raise ConfigError(f"threads must be a positive integer or None, got {threads!r}")
    return min(threads, _UNLIMITED_THREADS)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """A context in which torch runs the calling thread's operations with ``count`` threads."""
    own = torch.get_num_threads()
    if count == own:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(own)


@functools.cache
def say_threads(who: str, count: int) -> None:
    """Log, once, how many threads step."""
    log.info("%s steps with %d threads", who, count)
