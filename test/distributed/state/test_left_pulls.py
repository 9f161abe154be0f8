"""state_dict() that its caller leaves, since a rank is stopped or by an exception: it can be repeated, on any rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import zero_opt
from test.support.harness import Failure, run_processes
from test.support.stepped import make_stepped, service_of, take_step
from zero_opt.state import process_exit

SECONDS = 300  # nothing hangs


class _Alarm(Exception):
    """Of a signal handler."""


def _raise(*_: Any) -> None:
    raise _Alarm


def _step_of(optimizer: Any) -> float:
    return float(optimizer.state_dict()["state"][0]["step"].item())


def _goes_on(params: Any, optimizer: Any) -> list[float]:
    """Train on, with state that is read by all at once and by each rank alone."""
    take_step(params, optimizer)
    steps = [_step_of(optimizer)]
    for turn in range(dist.get_world_size()):
        if dist.get_rank() == turn:
            steps.append(_step_of(optimizer))
        dist.barrier()
    return steps


def _stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _one_is_stopped(rank: int, world_size: int, where: str, in_a_thread: bool) -> list[float]:
    """Rank 1 is stopped before it is asked, or when it begins to send its elements."""
    params, optimizer = make_stepped(2, checks=zero_opt.Checks(hang_timeout=0.5))
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 1:
        asked: Any = service_of(optimizer)
        send = asked._send_elements

        def stop_and_send(*given: Any) -> None:
            asked._send_elements = send
            _stop_here()
            send(*given)

        if where == "sends":
            asked._send_elements = stop_and_send
        else:
            _stop_here()
        store.wait(["told"])
    if rank == 0:
        with ThreadPoolExecutor(1) as pool, pytest.raises(zero_opt.PeerSilent, match=r"rank 1 .*repeat the call"):
            _ = pool.submit(optimizer.state_dict).result() if in_a_thread else optimizer.state_dict()
        os.kill(pids[1], signal.SIGCONT)
        assert _step_of(optimizer) == 2
        store.set("told", "")
    dist.barrier()
    return _goes_on(params, optimizer)


@pytest.mark.parametrize("in_a_thread", [False, True])
@pytest.mark.parametrize("where", ["before", "sends"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_once_a_stopped_rank_goes_on_state_can_be_had_again(world_size: int, where: str, in_a_thread: bool) -> None:
    found = run_processes(world_size, _one_is_stopped, where, in_a_thread, timeout=SECONDS)
    assert found == [[3.0, 3.0]] * world_size


def _one_is_interrupted(rank: int, world_size: int, where: str) -> list[float]:
    """Rank 0's state_dict() is left while it waits for an answer, or for elements, which come half a second later."""
    params, optimizer = make_stepped(2)
    asked: Any = service_of(optimizer)
    late = {"answers": "_offer", "elements": "_send_elements"}[where]
    done = getattr(asked, late)

    def later(*given: Any) -> Any:
        setattr(asked, late, done)
        time.sleep(1)
        return done(*given)

    signal.signal(signal.SIGALRM, _raise)
    if rank:
        setattr(asked, late, later)
    dist.barrier()
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(_Alarm):
            optimizer.state_dict()
        assert _step_of(optimizer) == 2
    dist.barrier()
    return _goes_on(params, optimizer)


@pytest.mark.parametrize("where", ["answers", "elements"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_that_an_exception_has_ended_disturbs_nobody(world_size: int, where: str) -> None:
    assert run_processes(world_size, _one_is_interrupted, where, timeout=SECONDS) == [[3.0, 3.0]] * world_size


def _exits_in_state_dict(rank: int, world_size: int) -> str:
    """A handler of rank 0 calls sys.exit() inside state_dict(), while the others wait for it in a step."""
    params, optimizer = make_stepped(2)
    asked: Any = service_of(optimizer)
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            optimizer.state_dict()
        except SystemExit:
            process_exit.serve_to_the_end()
        return ""
    offer = asked._offer
    asked._offer = lambda message: (time.sleep(1), offer(message))[1]
    with pytest.raises(zero_opt.PeerLost) as caught:
        take_step(params, optimizer)
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_exits_in_it_is_named(world_size: int) -> None:
    found = run_processes(world_size, _exits_in_state_dict, timeout=SECONDS, expect_errors=True)
    for said in found[1:]:
        assert not isinstance(said, Failure) and said.startswith("rank 0 has ended its program"), said
