"""Which cores the worker runs on, and which are left to the trainer."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...comm.groups import Group
from ...errors import ConfigError
from ...kernels.threads import allowed_threads, fair_threads
from ...policies import WorkerOffload
from ...system.devices import in_use
from ...system.log import log
from ..core_sharers import agreed_sharers, shared_by

_TASKS = Path("/proc/self/task")


class CoreSplit(NamedTuple):
    """Who runs where.

    Attributes:
        worker: cores of the worker. threads: how many threads it has.
        trainer: cores that the trainer is confined to; empty where it may use all it has.
    """

    worker: tuple[int, ...]
    threads: int
    trainer: tuple[int, ...] = ()


def split_cores(policy: WorkerOffload, usable: Sequence[int], allowed: int, sharers: int) -> CoreSplit:
    """Divide cores between worker and trainer.

    Where one of the two waits for the other, as with ``delay=0``, both may use all. Cores that several ranks share, or
    a single one, are not divided.

    Args:
        usable: cores that this process may use, those that share hardware side by side.
        allowed: how many of them the cgroup's quota grants the time of.
        sharers: how many ranks may use them.

    Raises:
        ConfigError: ``policy.cores`` are not usable here.
    """
    if policy.cores is not None:
        if not set(policy.cores) <= set(usable):
            raise ConfigError(f"WorkerOffload.cores={policy.cores}: this process may use {sorted(usable)} alone")
        rest = tuple(core for core in usable if core not in policy.cores)
        confined = rest if policy.steps_in_background and sharers == 1 else ()
        return CoreSplit(policy.cores, policy.threads or min(len(policy.cores), allowed), confined)
    if not policy.steps_in_background:
        return CoreSplit(tuple(usable), policy.threads or fair_threads(allowed, sharers))
    threads = policy.threads or fair_threads(allowed, 2 * sharers)
    if sharers > 1 or len(usable) == 1:
        return CoreSplit(tuple(usable), threads)
    count = min(threads, len(usable) - 1)
    return CoreSplit(tuple(usable[-count:]), threads, tuple(usable[:-count]))


def agreed_split(policy: WorkerOffload, group: Group) -> CoreSplit:
    """Return the split on this rank, given which other ranks of this host share its cores, and log it. Collective.

    A process that uses an accelerator is not confined: the threads of its driver and of its collectives would be too.
    """
    usable = sorted(os.sched_getaffinity(0), key=lambda core: (first_sibling(core), core))
    sharers = agreed_sharers(group, usable)
    split = split_cores(policy, usable, allowed_threads(len(usable)), sharers)
    if in_use():
        split = split._replace(trainer=())
    log.info(
        "rank %d: worker with %d threads on cores %s, trainer on %s%s",
        group.rank,
        split.threads,
        sorted(split.worker),
        sorted(split.trainer or usable),
        shared_by(sharers),
    )
    return split


def first_sibling(core: int) -> int:
    """The first of the cores that share hardware with one."""
    with contextlib.suppress(OSError, ValueError):
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        return int(path.read_text(encoding="ascii").replace("-", ",").split(",")[0])
    return core


class Confined:
    """All threads of this process on some cores, and torch with as many threads at most, until :meth:`restore`."""

    def __init__(self, cores: Collection[int]) -> None:
        own = os.sched_getaffinity(0)
        before = {}
        for tid in _tids():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                before[tid] = os.sched_getaffinity(tid)
        threads = torch.get_num_threads()
        for tid in before:
            _set_affinity(tid, cores)
        if threads > len(cores):
            torch.set_num_threads(len(cores))
        self._restore = weakref.finalize(self, _restore, os.getpid(), set(cores), own, before, threads)
        self._restore.atexit = False
        self._cores, self._all = set(cores), own

    @contextlib.contextmanager
    def lifted(self, cores: Collection[int] | None = None) -> Iterator[None]:
        """Within it the calling thread may run where it did before; for when the worker has nothing to do.

        Args:
            cores: it is to run on these alone.
        """
        confined = os.sched_getaffinity(0)
        if confined != self._cores:  # by others too
            yield
            return
        os.sched_setaffinity(0, self._all if cores is None else cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, confined)

    def restore(self) -> None:
        """Let every thread run where it did; those that have begun since, where the first one did."""
        self._restore()


def _restore(pid: int, cores: set[int], own: set[int], before: dict[int, set[int]], threads: int) -> None:
    if os.getpid() != pid:
        return
    for tid in _tids():
        with contextlib.suppress(OSError):
            if os.sched_getaffinity(tid) == cores:
                _set_affinity(tid, before.get(tid, own))
    if threads > len(cores) and torch.get_num_threads() == len(cores):
        torch.set_num_threads(threads)


def _tids() -> list[int]:
    return [int(task.name) for task in _TASKS.iterdir()]


def _set_affinity(tid: int, cores: Collection[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(tid, cores)
