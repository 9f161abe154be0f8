"""Ranks that leave training, one way or another, while others wait for them: who is named, and what is said."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from test.support.stepped import lost_in, make_stepped, service_of, take_step
from zero_opt.comm import process_exit, process_identity
from zero_opt.comm.departures import Departures
from zero_opt.system.waiting import until

WAYS = {
    "ends": "rank 1 has ended its program after 2 steps; do all ranks have the same number of batches?",
    "fails": "rank 1 has ended its program with an exception after 2 steps;",
    "closes": "rank 1 has closed this optimizer after 2 steps; do all ranks have the same number of batches?",
}
# Which exchange, and whether ranks know of each other's processes.
PLACES = {"shared memory": ("auto", True), "backend": ("backend", True), "hosts": ("backend", False)}
places = pytest.mark.parametrize("place", PLACES)
world_sizes = pytest.mark.parametrize("world_size", [2, 3])


def _stepped(
    rank: int, place: str, steps: int = 2, reduction: Any = zero_opt.Overlapped, **options: Any
) -> tuple[Any, Any]:
    exchange, near = PLACES[place]
    if not near:
        process_identity.host_if_known = lambda: f"host {rank}"
    return make_stepped(steps, reduction=reduction(0.002, exchange=exchange), **options)


def _leave(optimizer: Any, how: str) -> None:
    if how == "closes":
        optimizer.close()
    elif how == "ends":
        process_exit.serve_to_the_end()
    else:
        try:
            raise SystemError("training went wrong")
        except SystemError:
            process_exit.serve_to_the_end()


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "step": take_step,
    "clip": lambda params, optimizer: optimizer.clip_grad_norm_(1.0),
    "consolidate": lambda params, optimizer: optimizer.consolidate_state_dict(),
    "flush": lambda params, optimizer: optimizer.flush(),
    "load": lambda params, optimizer: optimizer.load_state_dict(torch.optim.AdamW(params).state_dict()),
    "add_param_group": lambda params, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
}


def _one_leaves(rank: int, world_size: int, place: str, how: str, call: str) -> Any:
    options = {"offload": zero_opt.CPUOffload(pin_memory=False)} if call == "flush" else {}
    params, optimizer = _stepped(rank, place, **options)
    if rank == 1:
        _leave(optimizer, how)
        return None
    said = lost_in(lambda: CALLS[call](params, optimizer))
    optimizer.close()
    return said


@places
@world_sizes
@pytest.mark.parametrize("how", WAYS)
def test_a_rank_that_leaves_is_named_with_its_last_step(how: str, world_size: int, place: str) -> None:
    found = run_processes(world_size, _one_leaves, place, how, "step")
    for name, text in found[:1] + found[2:]:
        assert name == "PeerLost"
        assert text.startswith(WAYS[how])


def _one_fails_and_closes(rank: int, world_size: int) -> Any:
    def fails(*_: object) -> Iterator[int]:
        yield from ()
        raise SystemError("a step went wrong")

    params, optimizer = _stepped(rank, "backend")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(optimizer._engine.placement, "step", fails)
        with pytest.raises((SystemError, zero_opt.StepFailed)):
            take_step(params, optimizer)
    if rank == 1:
        return optimizer.close()
    return lost_in(lambda: take_step(params, optimizer))


def test_a_step_that_has_failed_does_not_count() -> None:
    assert run_processes(2, _one_fails_and_closes)[0][1].startswith(WAYS["closes"])


@pytest.mark.parametrize("call", list(CALLS)[1:])
def test_every_call_of_all_ranks_names_it(call: str) -> None:
    found = run_processes(3, _one_leaves, "hosts", "ends", call)
    for name, text in found[:1] + found[2:]:
        assert name == "PeerLost"
        assert text.startswith(WAYS["ends"])


def _has_no_step(rank: int, world_size: int) -> Any:
    params, optimizer = _stepped(rank, "hosts", steps=0)
    if rank == 1:
        _leave(optimizer, "ends")
        return None
    said = lost_in(lambda: take_step(params, optimizer))
    optimizer.close()
    return said


def test_a_rank_that_has_taken_no_step() -> None:
    found = run_processes(2, _has_no_step)[0]
    assert found[1].startswith("rank 1 has ended its program before its first step;")


def _asked_after_it_has_ended(rank: int, world_size: int) -> Any:
    params, optimizer = _stepped(rank, "hosts")
    if rank == 1:
        _leave(optimizer, "ends")
        return None
    lost_in(lambda: take_step(params, optimizer))
    step = optimizer.state_dict()["state"][0]["step"].item()
    optimizer.close()
    return step


def test_ranks_that_have_lost_one_that_ended_can_save_the_last_step() -> None:
    assert run_processes(3, _asked_after_it_has_ended) == [2, None, 2]


def _a_fork_closes(rank: int, world_size: int, place: str) -> Any:
    params, optimizer = _stepped(rank, place)
    pid = os.fork()
    if pid == 0:
        optimizer.close()
        os._exit(0)
    os.waitpid(pid, 0)
    take_step(params, optimizer)
    step = optimizer.state_dict()["state"][0]["step"].item()
    dist.barrier()
    optimizer.close()
    return step


@places
def test_a_fork_that_closes_is_no_rank_that_leaves(place: str) -> None:
    assert run_processes(2, _a_fork_closes, place) == [3, 3]


def _leaves_within_a_step(rank: int, world_size: int, place: str) -> Any:
    """Rank 1 takes part in the agreement on the step, and not in the exchange of its gradients."""
    exchange, near = PLACES[place]
    if not near:
        process_identity.host_if_known = lambda: f"host {rank}"
    params, optimizer = make_stepped(2, reduction=zero_opt.AtStep(0.002, exchange=exchange))
    if rank == 1:

        def fail(*arguments: object, **options: object) -> None:
            _leave(optimizer, "fails")
            raise SystemError("training went wrong")

        optimizer._engine.reduction._reduce = fail  # type: ignore[union-attr]
        with pytest.raises(SystemError):
            take_step(params, optimizer)
        return None
    said = lost_in(lambda: take_step(params, optimizer))
    optimizer.close()
    return said


@places
@world_sizes
def test_an_exchange_that_waits_for_it_ends(world_size: int, place: str) -> None:
    found = run_processes(world_size, _leaves_within_a_step, place)
    for name, text in found[:1] + found[2:]:
        assert name == "PeerLost"
        assert text.startswith(WAYS["fails"])


def _one_is_silent(rank: int, world_size: int, place: str) -> Any:
    """Rank 0 gives rank 1 up, which breaks its connection to rank 2, whose time is not up yet."""
    # The agreement alone waits; beside an exchange, either may give rank 1 up first.
    params, optimizer = _stepped(rank, place, reduction=zero_opt.AtStep, checks=zero_opt.Checks(timeout=4.0))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["told"])
        return None
    if rank == 2:
        time.sleep(2)
    said = lost_in(lambda: take_step(params, optimizer))
    if store.add("given up", 1) == 2:
        store.set("told", "")
    return said


@places
def test_a_rank_that_is_given_up_is_silent_to_all(place: str) -> None:
    first, _, second = run_processes(3, _one_is_silent, place)
    for name, text in (first, second):
        assert name == "PeerSilent"
        assert re.match(r"rank 1 (\(pid \d+\) )?has not come to step 2 in [\d.]+ s, and its last step is 1", text), text


def _comes_late(rank: int, world_size: int, place: str) -> tuple[str, str]:
    """Ranks 0 and 2 give rank 1 up, and end at once; rank 1 comes then."""
    params, optimizer = _stepped(rank, place, checks=zero_opt.Checks(timeout=2.0))
    pids = [int(pid) for pid in optimizer._group.all_gather_bytes(str(os.getpid()).encode())]
    if rank == 1:
        assert until(lambda: all(process_identity._stat(pids[other])[0] in "ZXx" for other in (0, 2)), PATIENCE_S)
    said = lost_in(lambda: take_step(params, optimizer))
    if rank != 1:
        process_exit.serve_to_the_end()
        os._exit(said[0] != "PeerSilent" or not said[1].startswith("rank 1 "))
    return said


@places
def test_ranks_that_have_ended_after_they_gave_up_are_not_lost(place: str) -> None:
    first, (name, text), last = run_processes(3, _comes_late, place, expect_errors=True)
    assert first.message == last.message == "exit code 0 before it answered"
    assert name == "PeerSilent", text
    assert "the other ranks have given up waiting for this one" in text


# ---------------------------------------------------------------------------------------------------------------------
# killed


def _one_is_killed(rank: int, world_size: int, place: str) -> Any:
    """Rank 2 notices first, and ends; rank 0 waits for it then."""
    params, optimizer = _stepped(rank, place)
    pids = optimizer._group.all_gather_bytes(str(os.getpid()).encode())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        lost_in(lambda: take_step(params, optimizer))
        os._exit(0)
    if world_size > 2:
        while process_identity._stat(int(pids[2]))[0] not in "ZXx":
            time.sleep(0.05)
    return lost_in(lambda: take_step(params, optimizer)), int(pids[1])


@places
@pytest.mark.parametrize("world_size", [2, 3, 5])  # of five, the agreement goes in rounds on a thread
def test_a_killed_rank_is_named_and_not_the_one_that_noticed_first(world_size: int, place: str) -> None:
    (name, text), pid = run_processes(world_size, _one_is_killed, place, expect_errors=True)[0]
    assert name == "PeerLost"
    who = rf"rank 1 \(pid {pid}\) has ended" if PLACES[place][1] else "rank 1 has ended, or its host does not answer,"
    assert re.match(f"{who} while step 2 waits for it, and its last step is 1", text), text


def _one_is_killed_beside_a_stopped_one(rank: int, world_size: int) -> Any:
    """Rank 2, which would tell of rank 1, is stopped."""
    params, optimizer = _stepped(rank, "hosts", checks=zero_opt.Checks(timeout=30.0))
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return lost_in(lambda: take_step(params, optimizer))


def test_a_killed_rank_is_not_cut_off_where_its_neighbor_is_stopped() -> None:
    (name, text), *_ = run_processes(
        3, _one_is_killed_beside_a_stopped_one, timeout=PATIENCE_S, expect_errors=True, may_hang={2}
    )
    assert name == "PeerLost"
    assert text.startswith("rank 1 has ended, or its host does not answer, while step 2 waits for it"), text


def _one_is_killed_as_two_threads_notice(rank: int, world_size: int, first: str) -> Any:
    """Rank 1 is on one host with rank 0, which is killed. The first of its threads to notice that is late to say it."""
    process_identity.host_if_known = lambda: f"host {rank // 2}"
    params, optimizer = make_stepped(2, reduction=zero_opt.Overlapped(0.002, exchange="backend"))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        service, watch = service_of(optimizer), optimizer._group.watch
        departures, said, leave_broken = watch.departures, threading.Event(), watch.leave_broken

        def has_heard() -> None:
            assert until(lambda: departures.knows(0), PATIENCE_S)

        def late(departure: Any) -> None:
            if (threading.current_thread() is service._ring.thread) == (first == "ring"):
                said.wait(PATIENCE_S) if first == "ring" else service._ring.thread.join(PATIENCE_S)
            Departures.say(departures, departure)

        departures.say = late
        if first == "exchange":
            watch.leave_broken = lambda *arguments: (has_heard(), leave_broken(*arguments))
        else:
            has_heard()
        found = lost_in(lambda: take_step(params, optimizer))
        if first == "ring":
            os._exit(0)
        return found
    return lost_in(lambda: take_step(params, optimizer))


@pytest.mark.parametrize("first", ["exchange", "ring"])
def test_the_others_hear_of_a_killed_rank_whichever_thread_has_noticed_it(first: str) -> None:
    found = run_processes(4, _one_is_killed_as_two_threads_notice, first, expect_errors=True)
    for name, text in found[2:]:
        assert name == "PeerLost"
        assert text.startswith("rank 0 has ended, or its host does not answer, while step 2 waits for it"), text


def _kill_beside_a_child(folder: str) -> None:
    """End this process as SIGKILL does, while a process that it has forked holds its connections open."""
    child = os.fork()
    if child == 0:
        while os.path.exists(folder):
            time.sleep(0.1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _asks_in_a_thread(params: Any, optimizer: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(optimizer.state_dict).result()


UNBROKEN: dict[str, Callable[[Any, Any], Any]] = {
    **{name: call for name, call in CALLS.items() if name != "flush"},
    "state_dict": lambda params, optimizer: optimizer.state_dict(),
    "state_dict in a thread": _asks_in_a_thread,
}


def _one_is_killed_whose_child_lives(rank: int, world_size: int, folder: str, call: str) -> Any:
    params, optimizer = _stepped(rank, "backend")
    pids = optimizer._group.all_gather_bytes(str(os.getpid()).encode())
    if rank == 1:
        _kill_beside_a_child(folder)
    first = lost_in(lambda: UNBROKEN[call](params, optimizer))
    return first, lost_in(optimizer.state_dict), int(pids[1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("call", UNBROKEN)
def test_a_killed_rank_is_noticed_whose_child_holds_its_connections(call: str, tmp_path: Path) -> None:
    folder = tmp_path / "running"
    folder.mkdir()
    try:
        found = run_processes(
            3, _one_is_killed_whose_child_lives, str(folder), call, timeout=PATIENCE_S, expect_errors=True, may_hang={1}
        )
    finally:
        folder.rmdir()
    for *said, pid in found[:1] + found[2:]:
        for name, text in said:
            assert name == "PeerLost"
            waits = r"(this rank waits for its message|([a-z_]+\(\) before )?step 2 waits for it)"
            assert re.match(rf"rank 1 \(pid {pid}\) has ended while {waits}, and its last step is 1", text), text


def _asked_by_one_that_is_killed(rank: int, world_size: int, folder: str) -> Any:
    """Rank 1 is killed while rank 0 is ready to send it state, which may not change until then."""
    params, optimizer = _stepped(rank, "backend")
    if rank == 1:
        service_of(optimizer)._questions._fetch_all = lambda *_: _kill_beside_a_child(folder)
        optimizer.state_dict()
    while not service_of(optimizer)._guard._readers:
        time.sleep(0.01)
    return lost_in(lambda: take_step(params, optimizer))


def test_a_step_that_waits_for_a_killed_reader_ends(tmp_path: Path) -> None:
    folder = tmp_path / "running"
    folder.mkdir()
    try:
        (name, text), _ = run_processes(
            2, _asked_by_one_that_is_killed, str(folder), timeout=PATIENCE_S, expect_errors=True, may_hang={1}
        )
    finally:
        folder.rmdir()
    assert name == "PeerLost"
    assert re.match(r"rank 1 \(pid \d+\) has ended while step 2 waits for it, and its last step is 1", text), text


def _the_store_is_lost(rank: int, world_size: int, folder: str) -> Any:
    port = Path(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), world_size, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE_S)
    )
    params, optimizer = _stepped(rank, "hosts")
    if rank == 0:
        time.sleep(2)  # the others wait
        os.kill(os.getpid(), signal.SIGKILL)
    return lost_in(lambda: take_step(params, optimizer))


@world_sizes
def test_rank_0_is_named_where_the_store_is_lost_with_it(world_size: int, tmp_path: Path) -> None:
    found = run_processes(world_size, _the_store_is_lost, str(tmp_path), expect_errors=True, backend=None)
    for name, text in found[1:]:
        assert name == "PeerLost"
        assert text.startswith("rank 0 has ended, or its host does not answer, while step 2 waits for it")


def _in_a_subgroup(rank: int, world_size: int, how: str) -> Any:
    """Of global ranks 1 and 2, the second leaves."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    params, optimizer = _stepped(rank, "shared memory", process_group=group)
    if rank == 2 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        _leave(optimizer, how)
        return None
    text = lost_in(lambda: take_step(params, optimizer))[1]
    optimizer.close()
    return text


@pytest.mark.parametrize("how", ["killed", "closes"])
def test_a_rank_of_a_subgroup_is_named_by_its_global_rank_too(how: str) -> None:
    found = run_processes(3, _in_a_subgroup, how, expect_errors=True)
    assert re.match(r"rank 1 \(global rank 2(, pid \d+)?\) has (ended|closed)", found[1]), found[1]


# ---------------------------------------------------------------------------------------------------------------------
# the exit of ranks that have lost one


def _exits_without(rank: int, world_size: int, closes: bool) -> bool:
    """Rank 1 is stopped, so its connections live; rank 0 has given it up."""
    process_exit._QUIET_S = 10.0 * PATIENCE_S
    params, optimizer = _stepped(rank, "shared memory", checks=zero_opt.Checks(hang_timeout=0.5))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return True
    assert lost_in(lambda: take_step(params, optimizer))[0] == "PeerSilent"
    if closes:
        optimizer.close()
    ending = threading.Thread(target=process_exit.serve_to_the_end, daemon=True)
    ending.start()
    ending.join(PATIENCE_S / 5)
    return not ending.is_alive()


@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_that_was_given_up_is_not_waited_for_at_exit(closes: bool) -> None:
    found = run_processes(2, _exits_without, closes, timeout=PATIENCE_S, expect_errors=True, may_hang={1})
    assert found[0] is True
