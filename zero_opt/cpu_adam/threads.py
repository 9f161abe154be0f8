"""How many threads step in this process, unless the user says.

[Note: a fair part of the cores]
By default they are as many as the cores that this process may use (affinity, and the time that its cgroup grants),
divided by the ranks of the host that may use the same ones. torch's own count is an upper bound, since the user may
have set it; but not where it is 1 by ``OMP_NUM_THREADS=1``, which launchers set for every rank, whatever the cores are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

import torch

_log = logging.getLogger("zero_opt")
_MOST_THREADS = 1 << 20
# Ranks that share the cores of this process, as far as ranks have told each other.
_met = 1


def allowed_threads(requested: int) -> int:
    """``requested``, but at most what this process's affinity and, with the extension, its cgroup's quota grant."""
    try:
        from .. import _native
    except ImportError:
        return max(min(requested, len(os.sched_getaffinity(0))), 1)
    return _native.usable_threads(requested)


def fair_threads(allowed: int, sharers: int) -> int:
    """The threads of one of so many ranks that share the time of so many cores; at least 1."""
    return max(allowed // sharers, 1)


def launched_sharers() -> int:
    """How many ranks share the cores of this process, by what torchrun has told it; 1 if that started nothing."""
    return _sharers_of(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@functools.cache
def _sharers_of(local_world_size: str) -> int:
    """The ranks of this host, in proportion where this process was given fewer cores than the one that started it."""
    if not local_world_size.isdecimal():
        return 1
    own = there = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # what started it has ended
        there = len(os.sched_getaffinity(os.getppid()))
    return max(round(int(local_world_size) * min(own / there, 1)), 1)


def meet_sharers(count: int) -> int:
    """So many ranks, this one among them, have told each other that they share cores.

    Returns:
        How many do: ranks that are in none of this optimizer's groups are known from torchrun.
    """
    global _met
    _met = max(_met, count)
    return max(count, launched_sharers())


def default_threads() -> int:
    """See [Note: a fair part of the cores]."""
    fair = fair_threads(allowed_threads(_MOST_THREADS), max(_met, launched_sharers()))
    own = torch.get_num_threads()
    if own == 1 and os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip() == "1":
        return fair
    return min(fair, own)


def checked_threads(threads: int | None) -> int:
    """How many threads to ask for.

    Raises:
        TypeError, ValueError: not a positive integer, nor None.
    """
    if threads is None:
        return default_threads()
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(f"threads must be a positive integer or None, got {threads!r}")
    if threads < 1:
        raise ValueError(f"threads must be a positive integer or None, got {threads!r}")
    return min(threads, _MOST_THREADS)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within it torch's own operations that the calling thread runs have so many threads."""
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
    _log.info("%s steps with %d threads", who, count)
