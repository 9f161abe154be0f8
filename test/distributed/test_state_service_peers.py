"""state_dict() on one rank alone, while another is done, dead, slow, ahead, or has failed."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.distributed.harness import run_processes
from test.distributed.stepped import make_stepped, service_of, take_step
from zero_opt import state_service

SECONDS = 40  # nothing hangs


def _others_gone(rank: int, world_size: int, how: str) -> Any:
    _, optimizer = make_stepped(2)
    if rank:
        if how == "closed":
            optimizer.close()
        elif how == "collected":
            gone = weakref.ref(optimizer)
            del optimizer
            gc.collect()
            assert gone() is None
        else:
            state_service._serve_to_the_end()
        return None
    time.sleep(0.3)
    found = optimizer.state_dict()
    optimizer.close()
    return found["state"][0]["step"].item()


@pytest.mark.parametrize("how", ["closed", "collected", "exit"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_are_done_serve_on(world_size: int, how: str) -> None:
    assert run_processes(world_size, _others_gone, how, timeout=SECONDS)[0] == 2


def _one_leaves_early(rank: int, world_size: int, when: float) -> float:
    params, optimizer = make_stepped()
    if rank == 1:
        time.sleep(when)
        optimizer.close()
        time.sleep(3)
        return 0
    time.sleep(0.5 - when)
    begun = time.monotonic()
    with pytest.raises(zero_opt.PeerLost):
        take_step(params, optimizer)
    return time.monotonic() - begun


@pytest.mark.parametrize("when", [0, 0.5])
def test_a_step_that_a_closed_rank_will_not_enter_is_an_error_at_once(when: float) -> None:
    found = run_processes(3, _one_leaves_early, when, timeout=SECONDS)
    assert max(found[0], found[2]) < 2.8


def _ends(rank: int, world_size: int) -> Any:
    _, optimizer = make_stepped()
    thread = service_of(optimizer)._thread
    time.sleep(0.2 * rank)
    optimizer.close()
    with pytest.raises(zero_opt.StateNotConsolidated, match="closed"):
        optimizer.state_dict()
    thread.join(10)
    return thread.is_alive() or bool(state_service._running)


@pytest.mark.parametrize("world_size", [2, 3])
def test_serving_ends_once_all_have_closed(world_size: int) -> None:
    assert not any(run_processes(world_size, _ends, timeout=SECONDS))


def _one_dies(rank: int, world_size: int, when: str) -> Any:
    _, optimizer = make_stepped()
    if rank == 2:
        if when == "while asked":
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "before":
        time.sleep(0.5)
    if rank == 0:
        if when == "while asked":
            service_of(optimizer)._guard.commit(2)  # the others are behind, and stay there
        begun = time.monotonic()
        with pytest.raises(zero_opt.PeerLost):
            optimizer.state_dict()
        return time.monotonic() - begun
    return None


@pytest.mark.parametrize("when", ["before", "while asked"])
def test_a_rank_that_is_killed_is_noticed_at_once(when: str) -> None:
    found = run_processes(3, _one_dies, when, timeout=SECONDS, expect_errors=True)
    assert found[0] < 5
    assert found[2].type_name == "Died"


def _one_is_slow(rank: int, world_size: int) -> Any:
    params, optimizer = make_stepped()
    wiring: Any = optimizer._sharded
    if rank == 1:
        done = wiring.stepped

        def late() -> None:
            time.sleep(0.5)
            done()

        wiring.stepped = late
    take_step(params, optimizer)
    begun = time.monotonic()
    step = optimizer.state_dict()["state"][0]["step"].item() if rank == 0 else None
    waited = time.monotonic() - begun
    optimizer.close()
    return step, waited


def test_a_rank_that_is_behind_is_waited_for() -> None:
    step, waited = run_processes(2, _one_is_slow, timeout=SECONDS)[0]
    assert step == 2
    assert 0.2 < waited < 10


def _one_stays_behind(rank: int, world_size: int) -> Any:
    _, optimizer = make_stepped(checks=zero_opt.Checks(timeout=2.0))
    said = ""
    if rank == 0:
        state_service.WARN_AFTER_S = 0.3  # type: ignore[attr-defined]
        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zero_opt").addHandler(handler)
        guard = service_of(optimizer)._guard
        guard.commit(2)
        with pytest.raises(zero_opt.PeerLost, match="in step 2 of this rank, but rank 1 has stayed in step 1"):
            optimizer.state_dict()
        guard.changes, guard.step = guard.changes - 1, 1
        assert [text for text in logged if "rank 1 (in step 1)" in text]
        said = optimizer.state_dict()["state"][0]["step"].item()
    dist.barrier()
    optimizer.close()
    return said


def test_a_rank_that_stays_behind_is_named() -> None:
    assert run_processes(2, _one_stays_behind, timeout=SECONDS)[0] == 1


def _one_is_ahead(rank: int, world_size: int) -> Any:
    params, optimizer = make_stepped(2)
    said = ""
    if rank == 0:
        guard = service_of(optimizer)._guard
        guard.changes, guard.step = guard.changes - 1, 1
        with pytest.raises(zero_opt.StepDesync) as caught:
            optimizer.state_dict()
        guard.changes, guard.step = guard.changes + 1, 2
        said = str(caught.value)
        assert optimizer.state_dict()["state"][0]["step"] == 2
    take_step(params, optimizer)
    optimizer.close()
    return said


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_ahead_is_named(world_size: int) -> None:
    said = run_processes(world_size, _one_is_ahead, timeout=SECONDS)[0]
    assert "in step 1 of this rank, but rank 1 has entered step 3" in said


def _one_of_two_is_ahead(rank: int, world_size: int) -> Any:
    """Rank 1 would give its state to rank 0, which cannot take it without that of rank 2."""
    params, optimizer = make_stepped(2)
    guard = service_of(optimizer)._guard
    guard.changes += rank == 2
    dist.barrier()
    if rank == 0:
        for _ in range(3):
            with pytest.raises(zero_opt.StepDesync, match="rank 2 has entered"):
                optimizer.state_dict()
    dist.barrier()
    guard.changes -= rank == 2
    dist.barrier()
    found = optimizer.state_dict()["state"][0]["step"].item() if rank == 0 else None
    take_step(params, optimizer)
    optimizer.close()
    return found


def test_a_pull_that_is_given_up_leaves_nothing_behind() -> None:
    assert run_processes(3, _one_of_two_is_ahead, timeout=SECONDS)[0] == 2


def _in_a_fork(rank: int, world_size: int) -> Any:
    _, optimizer = make_stepped()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # should it hang, nobody else would end it
        try:
            optimizer.state_dict()
        except zero_opt.StateNotConsolidated:
            optimizer.close()
            os._exit(3)
        os._exit(4)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = len(optimizer.state_dict()["state"])
    optimizer.close()
    return code, found


def test_a_fork_has_nobody_to_ask_and_disturbs_nobody() -> None:
    assert run_processes(2, _in_a_fork, timeout=SECONDS) == [(3, 4), (3, 4)]


class Moody(torch.optim.SGD):
    """Fails on one rank."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """As SGD, or not at all."""
        if self.fails:
            raise ValueError("a mood")
        return super().step(closure)


def _one_fails(rank: int, world_size: int) -> Any:
    params = [nn.Parameter(torch.ones(130)), nn.Parameter(torch.ones(130))]
    optimizer = zero_opt.ShardedOptimizer(params, Moody, lr=0.1, momentum=0.9)
    take_step(params, optimizer)
    if rank == 1:
        Moody.fails = True
        with pytest.raises(ValueError, match="a mood"):
            take_step(params, optimizer)
        Moody.fails = False
    else:
        take_step(params, optimizer)
    with pytest.raises(zero_opt.StepFailed, match="a mood"):
        optimizer.state_dict()
    dist.barrier()
    with pytest.raises(zero_opt.StepFailed):
        take_step(params, optimizer)
    take_step(params, optimizer)
    step = len(optimizer.state_dict()["state"])
    optimizer.close()
    return step


def test_state_that_lacks_a_step_is_refused() -> None:
    assert run_processes(2, _one_fails, timeout=SECONDS) == [2, 2]


def _from_a_thread(rank: int, world_size: int) -> Any:
    """Asked for from beside training: the state of some step, or an error that says what to do."""
    params, optimizer = make_stepped()
    steps: list[set[float]] = []
    refused: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                state = optimizer.state_dict()["state"]
                steps.append({entry["step"].item() for entry in state.values()})
            except zero_opt.StepDesync as error:
                refused.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    if rank == 0:
        thread.start()
    for _ in range(40):
        take_step(params, optimizer)
    stop.set()
    if rank == 0:
        thread.join(20)
    dist.barrier()
    optimizer.close()
    return steps, refused


def test_asking_beside_training_never_mixes_steps() -> None:
    steps, refused = run_processes(3, _from_a_thread, timeout=SECONDS)[0]
    assert steps
    assert all(len(found) == 1 for found in steps)
    assert all("between steps" in text for text in refused)


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, zero_opt
rank, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
params = [torch.nn.Parameter(torch.ones(500))]
opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW)
params[0].sum().backward()
opt.step()
if rank == 0:
    time.sleep(1)
    if how == "return":
        torch.save(opt.state_dict(), folder + "/opt.pt")
elif how == "raise":
    raise SystemError("training went wrong")
"""


@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_process_that_returns_from_main_is_asked_and_one_that_fails_is_not_kept(how: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path), how], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=SECONDS)[1].decode() for process in (ranks[1], ranks[0])]
    codes = [process.returncode for process in ranks]
    if how == "return":
        assert codes == [0, 0], said
        saved = torch.load(tmp_path / "opt.pt", weights_only=True)
        assert saved["state"][0]["exp_avg"].shape == (500,)
    else:
        assert codes == [0, 1], said
