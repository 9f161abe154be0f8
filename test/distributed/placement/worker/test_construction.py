"""WorkerOffload that one rank or all cannot construct: the reason is told everywhere, and nothing stays behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import run_processes
from test.support.numa_nodes import stand_in_system
from test.support.worker_training import LATER, NOW, make, make_params, worker_of
from zero_opt.placement.worker import cores
from zero_opt.placement.worker.placement import WorkerPlacement
from zero_opt.placement.worker.process import WorkerProcess, control_nbytes
from zero_opt.system import numa, shared_memory


def _construct_apart(rank: int, world_size: int, offloads: Any, error: Any) -> str:
    with pytest.raises(error) as caught:
        make(make_params(), offload=offloads[rank])
    return str(caught.value)


@pytest.mark.parametrize("offloads", [(None, NOW), (LATER, None), (NOW, LATER)])
def test_ranks_that_offload_differently(offloads: Any) -> None:
    for message in run_processes(2, _construct_apart, offloads, zero_opt.RankMismatch):
        assert message.startswith("offload: ")


def test_cores_that_one_rank_does_not_have() -> None:
    offloads = (NOW, zero_opt.WorkerOffload(cores=(4000,)))
    for message in run_processes(2, _construct_apart, offloads, zero_opt.ConfigError):
        assert "4000" in message


def test_cores_come_back_when_construction_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0), torch.get_num_threads()
    monkeypatch.setattr(shared_memory, "memory_left", lambda: 10)
    with pytest.raises(zero_opt.OutOfMemory) as caught:
        make(make_params(), offload=LATER)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before
    assert caught.tb  # it keeps everything that was made


def _cores_of_worker(rank: int, world_size: int, folder: str, addresses: Any) -> tuple[Any, Any, int]:
    """The cores that worker and trainer may run on, and the worker's threads."""
    numa.SYSTEM = Path(folder)
    if addresses is not None:
        cores.in_use = lambda: True  # type: ignore[attr-defined]
        cores.pci_address = lambda _: addresses[rank]  # type: ignore[attr-defined]
        torch.accelerator.current_device_index = lambda: 0
    optimizer = make(make_params(), offload=NOW)
    worker = worker_of(optimizer)
    found = os.sched_getaffinity(worker._handles.child.pid), os.sched_getaffinity(0), worker.threads
    optimizer.close()
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two nodes need two cores")
@pytest.mark.parametrize("addresses", [None, ("0000:d8:00.0", "0000:3b:00.0")])
def test_workers_run_on_the_nodes_of_their_ranks(addresses: Any, tmp_path: Path) -> None:
    """And trainers where they did."""
    usable = sorted(os.sched_getaffinity(0))
    half = len(usable) // 2
    nodes = [usable[:half], usable[half : 2 * half]]
    os.sched_setaffinity(0, set(usable[: 2 * half]))
    try:
        listed = {node: ",".join(map(str, part)) for node, part in enumerate(nodes)}
        stand_in_system(tmp_path, listed, {"0000:3b:00.0": 0, "0000:d8:00.0": 1})
        runs = run_processes(2, _cores_of_worker, str(tmp_path), addresses)
    finally:
        os.sched_setaffinity(0, set(usable))
    expected = nodes if addresses is None else nodes[::-1]
    for (worker, trainer, threads), node in zip(runs, expected, strict=True):
        assert sorted(worker) == node and trainer == set(usable[: 2 * half]) and threads <= half


def test_the_worker_touches_pages_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are on its node: neither the trainer, nor the locking of pages for an accelerator, takes them before."""
    taken: dict[str, list[int]] = {"before": [], "locked": []}
    start = WorkerProcess.start

    def held(worker: WorkerProcess) -> int:
        return 512 * os.fstat(worker.arena.fd).st_blocks

    def started(worker: WorkerProcess) -> None:
        taken["before"].append(held(worker))
        start(worker)

    def locked(placement: WorkerPlacement, _: Any) -> None:
        taken["locked"].append(held(placement._worker) - placement._worker.arena.bytes.numel())

    monkeypatch.setattr(WorkerProcess, "start", started)
    monkeypatch.setattr(WorkerPlacement, "_lock_pages", locked)
    optimizer = make([torch.nn.Parameter(torch.ones(3_000_000))], offload=NOW)
    control = control_nbytes(worker_of(optimizer).threads)
    optimizer.close()
    assert max(taken["before"]) <= control and taken["locked"]
    assert all(abs(missing) <= control for missing in taken["locked"])
