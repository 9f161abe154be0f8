"""Which cores the worker runs on, and which are left to the trainer."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...comm.groups import Group
from ...errors import ConfigError
from ...kernels.threads import allowed_threads, fair_threads, meet_sharers
from ...policies import WorkerOffload
from ...system.devices import in_use, pci_address
from ...system.log import log
from ...system.numa import cores_by_node, node_of_device, ranges
from ..core_sharers import Seats, agreed_seats, shared_by

_TASKS = Path("/proc/self/task")
# The cores of each NUMA node.
Nodes = Mapping[int, frozenset[int]]


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


def home_node(seats: Seats, nodes: Nodes, threads: int) -> int | None:
    """Return the NUMA node that this rank's worker belongs on; ``None`` if it does better with all of its cores.

    It is the node of the rank's cores if they are on one, else that of its accelerator. Ranks without an accelerator
    that share cores of several nodes are spread over these. A worker has as many threads as without nodes: one whose
    node has no core for each thread of those that belong there keeps all cores.

    Args:
        threads: of the worker.
    """
    mine = seats.mine
    parts = {node: mine.cores & cores for node, cores in nodes.items() if mine.cores & cores}
    if sum(map(len, parts.values())) < len(mine.cores):
        return None  # of some it is not known where they are
    if len(parts) == 1:
        return next(iter(parts))
    if mine.node is not None:
        node, belonging = mine.node, sum(seat.node == mine.node for seat in seats.ranks)
    else:
        alike = [rank for rank, seat in enumerate(seats.ranks) if seat == mine]
        if len(alike) % len(parts) or len({len(part) for part in parts.values()}) > 1:
            return None
        belonging = len(alike) // len(parts)
        node = sorted(parts)[alike.index(seats.own) // belonging]
    return node if len(parts.get(node, ())) >= belonging * threads else None


def agreed_split(policy: WorkerOffload, group: Group) -> CoreSplit:
    """Return the split on this rank, given which other ranks of this host share its cores, and log it. Collective.

    A process that uses an accelerator is not confined: the threads of its driver and of its collectives would be too.
    On a host of several NUMA nodes the worker is on that of :func:`home_node`, and so are the pages of the arena, which
    its threads touch first.
    """
    nodes = cores_by_node()
    usable, node = os.sched_getaffinity(0), None
    if len(nodes) < 2:
        nodes = {}
    elif in_use():
        node = node_of_device(pci_address(torch.accelerator.current_device_index()))
    node_of = {core: number for number, cores in nodes.items() for core in cores}
    in_order = sorted(
        usable, key=lambda core: (node_of.get(core, 0) == node, node_of.get(core, 0), first_sibling(core), core)
    )
    seats = agreed_seats(group, usable, node)
    sharers = meet_sharers(seats.sharers)
    split = split_cores(policy, in_order, allowed_threads(len(usable)), sharers)
    home = home_node(seats, nodes, split.threads)
    if policy.cores is None and home is not None:
        split = split._replace(worker=tuple(core for core in split.worker if core in nodes[home]))
    if in_use():
        split = split._replace(trainer=())
    log.info(
        "rank %d: worker with %d threads on cores %s%s, trainer on %s%s",
        group.rank,
        split.threads,
        sorted(split.worker),
        _on_nodes({node_of[core] for core in split.worker if core in node_of}),
        sorted(split.trainer or usable),
        shared_by(sharers),
    )
    return split


def _on_nodes(nodes: Collection[int]) -> str:
    """Return the part of a message that names NUMA nodes; "" for none."""
    return f" of NUMA node{'s' if len(nodes) > 1 else ''} {ranges(nodes)}" if nodes else ""


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
