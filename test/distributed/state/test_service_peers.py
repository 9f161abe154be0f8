"""state_dict() on one rank alone, while another is done, dead, slow, ahead, or has failed."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from test.support.stepped import make_stepped, service_of, take_step
from zero_opt.comm import process_exit
from zero_opt.state import messages


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
            process_exit.serve_to_the_end()
        return None
    time.sleep(0.3)
    found = optimizer.state_dict()
    optimizer.close()
    return found["state"][0]["step"].item()


@pytest.mark.parametrize("how", ["closed", "collected", "exit"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_are_done_serve_on(world_size: int, how: str) -> None:
    assert run_processes(world_size, _others_gone, how)[0] == 2


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
    found = run_processes(3, _one_leaves_early, when)
    assert max(found[0], found[2]) < 2.8


def _one_drops_its_model(rank: int, world_size: int, how: str) -> Any:
    """What is alive of rank 1's model, and how many parameters rank 0 has state of then."""
    params, optimizer = make_stepped(2)
    alive: list[Any] = []
    if rank == 1:
        if how == "failed":  # the traceback leads to the model
            try:
                _fail_with(params, optimizer)
            except ValueError as error:
                service_of(optimizer)._guard.failure = error
        if how != "collected":
            optimizer.close()
        alive = [weakref.ref(kept) for kept in (*params, optimizer)]
        del optimizer, params
        gc.collect()
        alive = [kept() for kept in alive if kept() is not None]
    dist.barrier()
    if rank == 1:
        return len(alive)
    with pytest.raises(zero_opt.StepFailed) if how == "failed" else contextlib.nullcontext():
        found = optimizer.state_dict()["state"]
        assert {entry["exp_avg"].shape for entry in found.values()} == {param.shape for param in params}
    optimizer.close()
    return None


def _fail_with(params: Any, optimizer: Any) -> None:
    raise ValueError(f"{len(params)} parameters of {type(optimizer).__name__}")


@pytest.mark.parametrize("how", ["closed", "collected", "failed"])
def test_a_rank_that_serves_on_keeps_no_model(how: str) -> None:
    assert run_processes(2, _one_drops_its_model, how)[1] == 0


def _all_but_the_first_are_closed(rank: int, world_size: int, askers: int) -> Any:
    """Several ask at once, again and again, ranks that can deliver to one at a time."""
    _, optimizer = make_stepped(2)
    if rank >= askers:
        optimizer.close()
    dist.barrier()
    found = [optimizer.state_dict() for _ in range(10)] if rank < askers else []
    dist.barrier()
    optimizer.close()
    return [len(state_dict["state"]) for state_dict in found]


@pytest.mark.parametrize(("world_size", "askers"), [(3, 2), (4, 2), (4, 3)])
def test_closed_ranks_are_asked_by_several_at_once(world_size: int, askers: int) -> None:
    found = run_processes(world_size, _all_but_the_first_are_closed, askers)
    assert found == [[4] * 10] * askers + [[]] * (world_size - askers)


def _others_stay_open(rank: int, world_size: int) -> None:
    """A closed rank's patience ends, but not while it is asked."""
    _, optimizer = make_stepped(checks=zero_opt.Checks(timeout=4.0))
    if rank == 1:
        thread, begun = service_of(optimizer)._ring.thread, time.monotonic()
        optimizer.close()
        dist.barrier()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert time.monotonic() - begun > 3.9
    else:
        questions = service_of(optimizer)._questions
        fetch = questions._fetch_all
        questions._fetch_all = lambda *args: time.sleep(4.5) or fetch(*args)  # past the four seconds
        dist.barrier()  # it is asked at once, within them
        assert len(optimizer.state_dict()["state"]) == 4
    dist.barrier()
    if rank == 0:
        with pytest.raises(zero_opt.PeerLost):
            optimizer.state_dict()


def test_a_closed_rank_is_not_kept_for_ever() -> None:
    run_processes(2, _others_stay_open)


def _ends(rank: int, world_size: int) -> Any:
    _, optimizer = make_stepped()
    thread = service_of(optimizer)._ring.thread
    time.sleep(0.2 * rank)
    optimizer.close()
    with pytest.raises(zero_opt.StateNotConsolidated, match="closed"):
        optimizer.state_dict()
    thread.join(10)
    return thread.is_alive() or bool(process_exit.running)


@pytest.mark.parametrize("world_size", [2, 3])
def test_serving_ends_once_all_have_closed(world_size: int) -> None:
    assert not any(run_processes(world_size, _ends))


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
        with pytest.raises(zero_opt.PeerLost) as caught:
            optimizer.state_dict()
        return time.monotonic() - begun, str(caught.value)
    return None


@pytest.mark.parametrize("when", ["before", "while asked"])
def test_a_rank_that_is_killed_is_noticed_at_once(when: str) -> None:
    found = run_processes(3, _one_dies, when, expect_errors=True)
    seconds, said = found[0]
    assert seconds < 5
    waits = r"(this rank waits for its message|state_dict\(\) before step \d waits for it)"
    assert re.match(rf"rank 2 \(pid \d+\) has ended while {waits}", said), "no step waits"
    assert found[2].type_name == "Died"


def _closed_beside_a_pull(rank: int, world_size: int) -> str:
    """Rank 1 is killed; rank 0 asks for state, and its service notices and closes its connections meanwhile."""
    _, optimizer = make_stepped()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["asks"])
        os.kill(os.getpid(), signal.SIGKILL)
    asked = service_of(optimizer)
    ask = asked._questions._ask

    def late(*given: int) -> Any:
        store.set("asks", "")
        while asked._side._pg is not None:
            time.sleep(0.01)
        return ask(*given)

    asked._questions._ask = late
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.state_dict()
    return str(caught.value)


def test_a_pull_whose_connections_are_closed_names_the_lost_rank() -> None:
    said, _ = run_processes(2, _closed_beside_a_pull, expect_errors=True)
    assert re.match(r"rank 1 \(pid \d+\) has ended", said), said


def _one_is_slow(rank: int, world_size: int) -> Any:
    params, optimizer = make_stepped()
    engine: Any = optimizer._engine
    if rank == 1:
        done = engine._end_step

        def late(*ended: Any) -> None:
            time.sleep(0.5)
            done(*ended)

        engine._end_step = late
    take_step(params, optimizer)
    begun = time.monotonic()
    step = optimizer.state_dict()["state"][0]["step"].item() if rank == 0 else None
    waited = time.monotonic() - begun
    optimizer.close()
    return step, waited


def test_a_rank_that_is_behind_is_waited_for() -> None:
    step, waited = run_processes(2, _one_is_slow)[0]
    assert step == 2
    assert 0.2 < waited < PATIENCE_S / 2


def _one_stays_behind(rank: int, world_size: int) -> Any:
    _, optimizer = make_stepped(checks=zero_opt.Checks(timeout=2.0))
    said = ""
    if rank == 0:
        messages.WARN_AFTER_S = 0.3
        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zero_opt").addHandler(handler)
        guard = service_of(optimizer)._guard
        guard.commit(2)
        with pytest.raises(
            zero_opt.PeerLost, match=r"in step 2 of this rank, but rank 1 has stayed in step 1; .*Checks"
        ):
            optimizer.state_dict()
        guard.changes, guard.step = guard.changes - 1, 1
        assert [text for text in logged if "rank 1 (in step 1)" in text]
        said = optimizer.state_dict()["state"][0]["step"].item()
    dist.barrier()
    optimizer.close()
    return said


def test_a_rank_that_stays_behind_is_named() -> None:
    assert run_processes(2, _one_stays_behind)[0] == 1


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _one_has_left(rank: int, world_size: int) -> str:
    """Rank 1 is interrupted at the end of a step that the others take."""
    params, optimizer = make_stepped(2)
    if rank == 1:
        optimizer._engine._end_step = _interrupt  # type: ignore[union-attr, method-assign]
        with pytest.raises(KeyboardInterrupt):
            take_step(params, optimizer)
        dist.barrier()
        return ""
    take_step(params, optimizer)
    watch: Any = optimizer._engine._groups._watch  # type: ignore[union-attr]
    while not watch.departures.knows(1):
        time.sleep(0.01)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.state_dict()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_behind_because_it_has_left_is_not_asked_to_go_on(world_size: int) -> None:
    said = run_processes(world_size, _one_has_left)
    for message in said[:1] + said[2:]:
        assert message.startswith("rank 1 has left training after 2 steps, because an exception there")


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
    said = run_processes(world_size, _one_is_ahead)[0]
    assert "in step 1 of this rank, but rank 1, in step 2, changes its state or has changed it since" in said


def _one_of_two_is_ahead(rank: int, world_size: int) -> Any:
    """Rank 1 would give its state to rank 0, which cannot take it without that of rank 2."""
    params, optimizer = make_stepped(2)
    guard = service_of(optimizer)._guard
    guard.changes += rank == 2
    dist.barrier()
    if rank == 0:
        for _ in range(3):
            with pytest.raises(zero_opt.StepDesync, match="rank 2, in step 2, changes its state"):
                optimizer.state_dict()
    dist.barrier()
    guard.changes -= rank == 2
    dist.barrier()
    found = optimizer.state_dict()["state"][0]["step"].item() if rank == 0 else None
    take_step(params, optimizer)
    optimizer.close()
    return found


def test_a_pull_that_is_given_up_leaves_nothing_behind() -> None:
    assert run_processes(3, _one_of_two_is_ahead)[0] == 2


def _in_a_fork(rank: int, world_size: int) -> Any:
    _, optimizer = make_stepped()
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)  # should it hang, nothing else ends it
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
    assert run_processes(2, _in_a_fork) == [(3, 4), (3, 4)]


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
    Moody.fails = rank == 1
    with pytest.raises(ValueError if rank == 1 else zero_opt.StepFailed, match="a mood"):
        take_step(params, optimizer)
    Moody.fails = False
    for _ in range(2):
        with pytest.raises(zero_opt.StepFailed, match="a mood"):
            optimizer.state_dict()
    dist.barrier()
    take_step(params, optimizer)
    step = len(optimizer.state_dict()["state"])
    optimizer.close()
    return step


def test_state_that_lacks_a_step_is_refused() -> None:
    assert run_processes(2, _one_fails) == [2, 2]


def _lost_half_way(rank: int, world_size: int) -> str:
    """Rank 1 is killed in step 2, which the others have begun to change their state for."""
    params, optimizer = make_stepped(2)
    if rank == 1:
        placement: Any = optimizer._engine.placement  # type: ignore[union-attr]
        placement.step = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zero_opt.PeerLost):
        take_step(params, optimizer)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.state_dict()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_state_of_a_step_that_a_lost_rank_left_half_way_names_it(world_size: int) -> None:
    found = run_processes(world_size, _lost_half_way, expect_errors=True)
    assert found[1].type_name == "Died"
    for said in (text for rank, text in enumerate(found) if rank != 1):
        assert re.search(r"step 2 was left half-way: rank 1 .*restart all ranks from the last checkpoint", said), said


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
    steps, refused = run_processes(3, _from_a_thread)[0]
    assert steps
    assert all(len(found) == 1 for found in steps)
    assert all("between steps" in text for text in refused)
