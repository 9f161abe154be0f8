"""How worker and trainer share the cores."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from test.support.numa_nodes import stand_in_system
from zero_opt import ConfigError, WorkerOffload
from zero_opt.comm.alone_group import AloneGroup
from zero_opt.kernels.threads import fair_threads
from zero_opt.placement.core_sharers import Seat, Seats
from zero_opt.placement.worker import cores
from zero_opt.placement.worker.cores import Confined, CoreSplit, agreed_split, home_node, split_cores
from zero_opt.system import numa

EIGHT = tuple(range(8))


@pytest.mark.parametrize(
    ("policy", "usable", "allowed", "sharers", "expected"),
    [
        # at once: all cores, their time divided by those who share them
        (WorkerOffload(), EIGHT, 8, 1, CoreSplit(EIGHT, 8)),
        (WorkerOffload(), EIGHT, 4, 1, CoreSplit(EIGHT, 4)),
        (WorkerOffload(), EIGHT, 8, 4, CoreSplit(EIGHT, 2)),
        (WorkerOffload(), (0, 1), 2, 4, CoreSplit((0, 1), 1)),
        (WorkerOffload(threads=3), EIGHT, 8, 4, CoreSplit(EIGHT, 3)),
        # a step later: divided, unless they are shared or there is but one
        (WorkerOffload(1), EIGHT, 8, 1, CoreSplit(EIGHT[4:], 4, EIGHT[:4])),
        (WorkerOffload(1, threads=2), EIGHT, 8, 1, CoreSplit((6, 7), 2, EIGHT[:6])),
        (WorkerOffload(1, threads=9), EIGHT, 8, 1, CoreSplit(EIGHT[1:], 9, (0,))),
        (WorkerOffload(1), EIGHT, 2, 1, CoreSplit((7,), 1, EIGHT[:7])),
        (WorkerOffload(1), (0, 1), 2, 1, CoreSplit((1,), 1, (0,))),
        (WorkerOffload(1), (5,), 1, 1, CoreSplit((5,), 1)),
        (WorkerOffload(1), EIGHT, 8, 2, CoreSplit(EIGHT, 2)),
        # begun meanwhile: likewise
        (WorkerOffload(speculate=True), EIGHT, 8, 1, CoreSplit(EIGHT[4:], 4, EIGHT[:4])),
        (WorkerOffload(speculate=True, cores=(1, 3)), EIGHT, 8, 1, CoreSplit((1, 3), 2, (0, 2, 4, 5, 6, 7))),
        # named
        (WorkerOffload(cores=(1, 3)), EIGHT, 8, 1, CoreSplit((1, 3), 2)),
        (WorkerOffload(1, cores=(1, 3)), EIGHT, 8, 1, CoreSplit((1, 3), 2, (0, 2, 4, 5, 6, 7))),
        (WorkerOffload(1, cores=(1, 3), threads=1), EIGHT, 8, 2, CoreSplit((1, 3), 1)),
        (WorkerOffload(1, cores=EIGHT), EIGHT, 8, 1, CoreSplit(EIGHT, 8)),
    ],
)
def test_the_split(
    policy: WorkerOffload, usable: tuple[int, ...], allowed: int, sharers: int, expected: CoreSplit
) -> None:
    assert split_cores(policy, usable, allowed, sharers) == expected


def test_cores_that_are_not_ours() -> None:
    with pytest.raises(ConfigError, match=r"cores=\(1, 9\): this process may use \[0, 1\] alone"):
        split_cores(WorkerOffload(cores=(1, 9)), (0, 1), 2, 1)


@pytest.mark.parametrize("forgotten", [False, True])
def test_threads_are_confined_and_let_go(forgotten: bool) -> None:
    """Those that are there, and those that begin meanwhile, but for one that was somewhere else on purpose."""
    before = os.sched_getaffinity(0)
    core = min(before)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    seen, begun, go = [], threading.Event(), threading.Event()

    def later() -> None:
        seen.append(os.sched_getaffinity(0))
        begun.set()
        assert go.wait(60)
        seen.append(os.sched_getaffinity(0))

    try:
        confined = Confined({core})
        assert os.sched_getaffinity(0) == {core}
        assert torch.get_num_threads() == 1
        thread = threading.Thread(target=later)
        thread.start()
        assert begun.wait(60)
        if forgotten:
            del confined
            gc.collect()
        else:
            confined.restore()
            confined.restore()
        go.set()
        thread.join(60)
        assert seen == [{core}, before]
        assert os.sched_getaffinity(0) == before
        assert torch.get_num_threads() == 2
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def test_a_thread_may_leave_its_cores_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    confined = Confined({core})
    try:
        with confined.lifted():
            assert os.sched_getaffinity(0) == before
        assert os.sched_getaffinity(0) == {core}
        with confined.lifted({max(before)}):
            assert os.sched_getaffinity(0) == {max(before)}
        assert os.sched_getaffinity(0) == {core}
    finally:
        confined.restore()
    with confined.lifted():
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_ends_while_threads_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    listed = cores._tids
    monkeypatch.setattr(cores, "_tids", lambda: [*listed(), gone.pid])
    allowed = os.sched_getaffinity(0)
    confined = Confined(sorted(allowed)[:1])
    assert os.sched_getaffinity(0) == {min(allowed)}
    confined.restore()
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("used", [False, True])
def test_a_process_that_uses_an_accelerator_is_not_confined(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of its driver, and those of its collectives, would be confined too."""
    monkeypatch.setattr(cores, "in_use", lambda: used)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(EIGHT))
    monkeypatch.setattr(cores, "allowed_threads", lambda count: count)
    split = agreed_split(WorkerOffload(1), AloneGroup())
    assert len(split.worker) == 4
    assert len(split.trainer) == (0 if used else 4)


# ---------------------------------------------------------------------------------------------------------------------
# NUMA nodes

TWO = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
FOUR = {node: frozenset({2 * node, 2 * node + 1}) for node in range(4)}
ALL = frozenset(EIGHT)


def homes(seats: Sequence[Seat], nodes: Mapping[int, frozenset[int]]) -> list[int | None]:
    """Of ranks that share their cores fairly."""
    ranks = [Seats(seats, own) for own in range(len(seats))]
    return [home_node(rank, nodes, fair_threads(len(rank.mine.cores), rank.sharers)) for rank in ranks]


@pytest.mark.parametrize(
    ("seats", "nodes", "expected"),
    [
        # cores of one node alone, by numactl, taskset or a cpuset
        ([Seat(frozenset({5, 6}))], TWO, [1]),
        ([Seat(frozenset({5, 6}), 0)], TWO, [1]),
        # of several: one rank alone does better with all
        ([Seat(ALL)], TWO, [None]),
        ([Seat(ALL, 1)], TWO, [None]),
        # ranks that share cores are spread, the same number to a node, in order
        ([Seat(ALL)] * 2, TWO, [0, 1]),
        ([Seat(ALL)] * 3, TWO, [None] * 3),
        ([Seat(ALL)] * 4, TWO, [0, 0, 1, 1]),
        ([Seat(ALL)] * 4, FOUR, [0, 1, 2, 3]),
        ([Seat(frozenset(range(6)))] * 2, TWO, [None] * 2),  # 4 cores and 2
        # where accelerators are
        ([Seat(ALL, 1), Seat(ALL, 0)], TWO, [1, 0]),
        ([Seat(ALL, 1), Seat(ALL, 1)], TWO, [None, None]),  # two on four cores, with two free
        ([Seat(ALL, node) for node in (0, 0, 1, 1)], TWO, [0, 0, 1, 1]),
        ([Seat(ALL, 7)] * 2, TWO, [None] * 2),  # a node without cores of ours
        # no nodes
        ([Seat(ALL)] * 2, {}, [None] * 2),
        ([Seat(ALL)] * 2, {0: ALL}, [0] * 2),
    ],
)
def test_the_node_of_a_rank(
    seats: Sequence[Seat], nodes: Mapping[int, frozenset[int]], expected: Sequence[int | None]
) -> None:
    assert homes(seats, nodes) == expected


@given(
    st.integers(1, 4).flatmap(lambda count: st.lists(st.integers(0, count - 1), min_size=1, max_size=16)),
    st.lists(st.tuples(st.sets(st.integers(0, 17), min_size=1), st.one_of(st.none(), st.integers(0, 4))), min_size=1),
)
def test_no_rank_loses_by_a_node(of_node: list[int], ranks: list[tuple[set[int], int | None]]) -> None:
    """Whatever cores are on which nodes, on none (offline ones), and may be used by which rank."""
    nodes: dict[int, frozenset[int]] = {}
    for core, node in enumerate(of_node):
        nodes[node] = nodes.get(node, frozenset()) | {core}
    seats = [Seat(frozenset(usable), node) for usable, node in ranks]
    found = homes(seats, nodes)
    for seat, home in zip(seats, found, strict=True):
        if home is None or seat.cores <= nodes[home]:
            continue
        assert seat.node in (home, None) and seat.cores <= frozenset(range(len(of_node)))
        sharers = sum(not seat.cores.isdisjoint(other.cores) for other in seats)
        beside = sum(other == seat and at == home for other, at in zip(seats, found, strict=True))
        assert len(seat.cores & nodes[home]) >= beside * fair_threads(len(seat.cores), sharers)


class _OnNodes:
    """A process on eight cores of a machine with nodes, as one of several ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, nodes: Mapping[int, str]) -> None:
        stand_in_system(folder, nodes, {"0000:3b:00.0": 1, "0000:d8:00.0": -1})
        monkeypatch.setattr(numa, "SYSTEM", folder)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(EIGHT))
        monkeypatch.setattr(cores, "allowed_threads", lambda count: count)
        monkeypatch.setattr(cores, "first_sibling", lambda core: core)
        monkeypatch.setattr(cores, "meet_sharers", lambda count: count)
        self._patch = monkeypatch

    def split(self, policy: WorkerOffload, ranks: int, own: int, address: str | None = None) -> CoreSplit:
        """The split of a rank, whose accelerator is at an address, as is that of the others."""

        def seats(group: object, usable: set[int], node: int | None = None) -> Seats:
            return Seats([Seat(frozenset(usable), node)] * ranks, own)

        self._patch.setattr(cores, "agreed_seats", seats)
        self._patch.setattr(cores, "in_use", lambda: address is not None)
        self._patch.setattr(cores, "pci_address", lambda _: address)
        self._patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        return agreed_split(policy, AloneGroup())


def test_workers_are_on_the_nodes_of_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zero_opt")
    machine = _OnNodes(monkeypatch, tmp_path, {0: "0-1,4-5", 1: "2-3,6-7", 2: ""})
    near, far = (0, 1, 4, 5), (2, 3, 6, 7)
    assert machine.split(WorkerOffload(), 2, 0) == CoreSplit(near, 4)
    assert "worker with 4 threads on cores [0, 1, 4, 5] of NUMA node 0, trainer on [0, 1, 2, 3" in caplog.text
    assert machine.split(WorkerOffload(1), 2, 1) == CoreSplit(far, 2)
    assert machine.split(WorkerOffload(threads=5), 2, 1) == CoreSplit(near + far, 5)  # more than a node has
    assert "on cores [0, 1, 2, 3, 4, 5, 6, 7] of NUMA nodes 0-1, trainer" in caplog.text
    assert machine.split(WorkerOffload(cores=(1, 2)), 2, 1) == CoreSplit((1, 2), 2)
    # alone: all cores; those of one node, and the trainer on the other, where they are divided
    assert machine.split(WorkerOffload(), 1, 0) == CoreSplit(near + far, 8)
    assert machine.split(WorkerOffload(1), 1, 0) == CoreSplit(far, 4, near)


def test_workers_are_on_the_nodes_of_accelerators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _OnNodes(monkeypatch, tmp_path, {0: "0,2,4,6", 1: "1,3,5,7"})
    odd = (1, 3, 5, 7)
    assert machine.split(WorkerOffload(1), 1, 0, "0000:3b:00.0") == CoreSplit(odd, 4)
    assert machine.split(WorkerOffload(threads=3), 1, 0, "0000:3b:00.0") == CoreSplit(odd, 3)
    # of a node that is not known, ranks are as if they had none
    for own in range(2):
        assert machine.split(WorkerOffload(), 2, own, "0000:d8:00.0").worker == tuple(range(own, 8, 2))


@pytest.mark.parametrize("nodes", [{0: "0-7"}, {}, {0: "0-7", 1: ""}])
@pytest.mark.parametrize("policy", [WorkerOffload(), WorkerOffload(1), WorkerOffload(speculate=True, cores=(1, 3))])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_one_node_nothing_changes(
    nodes: dict[int, str],
    policy: WorkerOffload,
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "zero_opt")
    machine = _OnNodes(monkeypatch, tmp_path, nodes)
    assert machine.split(policy, ranks, ranks - 1) == split_cores(policy, EIGHT, 8, ranks)
    assert "worker with" in caplog.text and "NUMA" not in caplog.text
