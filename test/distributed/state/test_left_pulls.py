"""state_dict() that its caller leaves, since a rank is stopped or by an exception: it can be repeated, on any rank."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import zero_opt
from test.support.harness import Failure, run_processes
from test.support.stepped import make_stepped, service_of, take_step
from zero_opt.comm import process_exit
from zero_opt.system import background_thread

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
    """Stop the process before this thread goes on: of a signal to the process, another thread may take care later."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


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


def _is_stopped_again_and_again(rank: int, world_size: int) -> tuple[int, int, list[float]]:
    """Rank 0 repeats state_dict() while rank 1 is stopped; returns threads that wait, and pulls of rank 0."""
    params, optimizer = make_stepped(2, checks=zero_opt.Checks(hang_timeout=0.1))
    asked: Any = service_of(optimizer)
    waiting, opened, offer = 0, list[int](), asked._offer
    asked._offer = lambda message: (opened.append(message.origin), offer(message))[1]
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())  # before which no rank asks
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 1:
        _stop_here()
        store.wait(["told"])
    if rank == 0:
        for _ in range(4):
            with pytest.raises(zero_opt.PeerSilent, match=r"rank 1 .*repeat the call"):
                optimizer.state_dict()
        waiting = sum(thread.name == "zero_opt state wait" for thread in threading.enumerate())
        assert asked._departures.unannounced
        listed = background_thread._threads._listed
        assert listed[asked._questions._beside._thread] < math.inf  # or the exit would wait for it
        os.kill(pids[1], signal.SIGCONT)
        assert _step_of(optimizer) == 2
        assert not asked._departures.unannounced
        assert listed[asked._questions._beside._thread] == math.inf
        store.set("told", "")
    dist.barrier()
    asks = opened.count(0)
    return waiting, asks, _goes_on(params, optimizer)


@pytest.mark.parametrize("world_size", [2, 3])
def test_repeating_it_meanwhile_adds_no_threads_and_no_messages(world_size: int) -> None:
    found = run_processes(world_size, _is_stopped_again_and_again, timeout=SECONDS)
    first_and_last = 2
    assert found == [(1, 0, [3.0, 3.0])] + [(0, first_and_last, [3.0, 3.0])] * (world_size - 1)


def _held(asked: Any, late: str) -> Callable[[], None]:
    """Hold the next call of a method of the service until another rank allows it; returns what to call for that."""
    store: Any = dist.distributed_c10d._get_default_store()
    done = getattr(asked, late)

    def later(*given: Any) -> Any:
        setattr(asked, late, done)
        store.set("begun", "")
        while not store.check(["allowed"]):
            time.sleep(0.01)
        return done(*given)

    if dist.get_rank():
        setattr(asked, late, later)
    dist.barrier()
    return lambda: store.set("allowed", "")


def _signal_once_begun() -> None:
    """Send this process a signal when another rank has begun what :func:`_held` holds."""
    store: Any = dist.distributed_c10d._get_default_store()

    def send() -> None:
        while not store.check(["begun"]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGALRM)

    threading.Thread(target=send, daemon=True).start()


_METHODS = {"answers": "_offer", "elements": "_send_elements"}


def _one_is_interrupted(rank: int, world_size: int, where: str, then: str) -> list[float]:
    """Rank 0's state_dict() is left while it waits for an answer, or for elements, and called again, or not."""
    params, optimizer = make_stepped(2)
    signal.signal(signal.SIGALRM, _raise)
    allow = _held(service_of(optimizer), _METHODS[where])
    if rank == 0:
        _signal_once_begun()
        with pytest.raises(_Alarm):
            optimizer.state_dict()
        if then == "again":
            threading.Timer(0.1, allow).start()
            assert _step_of(optimizer) == 2
        allow()
    if then == "again":
        dist.barrier()
    return _goes_on(params, optimizer)


@pytest.mark.parametrize("then", ["again", "training"])
@pytest.mark.parametrize("where", _METHODS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_that_an_exception_has_ended_disturbs_nobody(world_size: int, where: str, then: str) -> None:
    assert run_processes(world_size, _one_is_interrupted, where, then, timeout=SECONDS) == [[3.0, 3.0]] * world_size


def _no_clock_runs_on(rank: int, world_size: int) -> list[str]:
    """A signal's handler raises in rank 0's state_dict() as soon as the clock of its warning has been started."""
    params, optimizer = make_stepped(2)
    if rank == 0:
        started = process_exit.started

        def interrupted(thread: threading.Thread) -> bool:
            started(thread)
            raise _Alarm

        process_exit.started = interrupted
        with pytest.raises(_Alarm):
            optimizer.state_dict()
        process_exit.started = started
    clocks = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    left = [clock.name for clock in clocks if not clock.finished.is_set()]
    assert _goes_on(params, optimizer) == [3.0] * world_size
    return left


def test_one_that_a_signal_has_ended_at_its_start_warns_of_nothing() -> None:
    assert run_processes(2, _no_clock_runs_on, timeout=SECONDS) == [[], []]


def _exits_in_state_dict(rank: int, world_size: int, where: str, late: bool) -> str:
    """A handler of rank 0 calls sys.exit() inside state_dict(), while the others wait for it in a step.

    Args:
        late: what it waited for comes when the interpreter's exit has given up waiting for its thread.
    """
    params, optimizer = make_stepped(2)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
    allow = _held(service_of(optimizer), _METHODS[where])
    if rank == 0:
        _signal_once_begun()
        try:
            optimizer.state_dict()
        except SystemExit:
            if not late:
                allow()
            background_thread._end_all()  # what is registered last with atexit is called first
            allow()
            process_exit.serve_to_the_end()
        return ""
    with pytest.raises(zero_opt.PeerLost) as caught:
        take_step(params, optimizer)
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", _METHODS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_exits_in_it_is_named(world_size: int, where: str, late: bool) -> None:
    found = run_processes(world_size, _exits_in_state_dict, where, late, timeout=SECONDS, expect_errors=True)
    for said in found[1:]:
        assert not isinstance(said, Failure) and said.startswith("rank 0 has ended its program"), said


def _asking_rank_is_stopped(rank: int, world_size: int) -> list[str]:
    """Rank 0 is stopped once the others have listed their state, until they have given up."""
    _, optimizer = make_stepped(2, checks=zero_opt.Checks(hang_timeout=0.5))
    asked: Any = service_of(optimizer)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    said = []
    if rank == 0:
        fetch = asked._questions._fetch_all
        asked._questions._fetch_all = lambda *given: (
            setattr(asked._questions, "_fetch_all", fetch),
            _stop_here(),
            fetch(*given),
        )[2]
        with pytest.raises(zero_opt.PeerLost):
            optimizer.state_dict()
    if rank == 1:
        while asked._capture is not None:
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGCONT)
    dist.barrier()
    while asked._capture is not None:
        time.sleep(0.01)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.state_dict()
    said.append(str(caught.value))
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert _step_of(optimizer) == 2
    return said


@pytest.mark.parametrize("world_size", [2, 3])
def test_once_the_asking_rank_was_stopped_the_error_says_how_state_can_be_had(world_size: int) -> None:
    for said in run_processes(world_size, _asking_rank_is_stopped, timeout=SECONDS):
        assert "call opt.consolidate_state_dict(to=rank) on every rank before opt.state_dict()" in said[0], said
