"""How worker and trainer share the cores."""

from __future__ import annotations

import gc
import os
import subprocess
import threading

import pytest
import torch

from zero_opt import ConfigError, WorkerOffload
from zero_opt.comm.alone_group import AloneGroup
from zero_opt.placement.worker import cores
from zero_opt.placement.worker.cores import Confined, CoreSplit, agreed_split, split_cores

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
