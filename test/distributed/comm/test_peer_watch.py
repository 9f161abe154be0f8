"""A rank that waits: for one that is stopped, or silent, or slow; and Ctrl-C."""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.descriptors import no_descriptors
from test.support.failures import PATIENCE_S
from test.support.harness import Failure, run_processes
from test.support.scenario import BUCKET_MB, OVERLAPPED
from zero_opt.comm import pairwise_exchange, process_identity, shared_memory_exchange, stops
from zero_opt.state import asking
from zero_opt.system.waiting import until

MOST_SECONDS = 60


def _optimizer(reduction: Any = OVERLAPPED, **checks: Any) -> tuple[torch.nn.Parameter, Any]:
    param = torch.nn.Parameter(torch.ones(300))
    opt = zero_opt.ShardedOptimizer([param], torch.optim.Adam, reduction=reduction, checks=zero_opt.Checks(**checks))
    for _ in range(3):
        param.grad = torch.ones(300)
        opt.step()
        opt.zero_grad()
    return param, opt


@contextlib.contextmanager
def _wake_later(pid: int, seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        os.kill(pid, signal.SIGCONT)


def _peer_pid(rank: int, opt: Any) -> int:
    gathered: list[bytes] = opt._group.all_gather_bytes(str(os.getpid()).encode())
    return int(gathered[1 - rank])


def _stopped(rank: int, world_size: int) -> Any:
    param, opt = _optimizer(hang_timeout=0.5)
    pid = _peer_pid(rank, opt)
    param.grad = torch.ones(300)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    before, begin = param.detach().clone(), time.monotonic()
    with _wake_later(pid, 20), pytest.raises(zero_opt.PeerSilent) as caught:
        opt.step()
    assert torch.equal(param, before)
    return str(caught.value), time.monotonic() - begin, pid


def test_a_stopped_rank_is_named_after_hang_timeout() -> None:
    message, seconds, pid = run_processes(2, _stopped, expect_errors=True)[0]
    assert 0.5 < seconds < MOST_SECONDS
    assert re.match(rf"rank 1 \(pid {pid}\) has been stopped for \d+ s while step 3 waits for it", message)
    assert "its last step is 2" in message and "kill -CONT" in message


def _stopped_for_a_while(rank: int, world_size: int, call: str) -> list[str]:
    param, opt = _optimizer(hang_timeout=0.5)
    saved = opt.state_dict()
    pid = _peer_pid(rank, opt)  # both have their state dicts
    calls = {"step": opt.step, "load": lambda: opt.load_state_dict(saved), "clip": lambda: opt.clip_grad_norm_(1.0)}
    messages = []
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    for again in (call, "step"):
        param.grad = torch.ones(300)
        with pytest.raises(zero_opt.PeerSilent) as caught:
            calls[again]()
        messages.append(str(caught.value))
        if rank == 0:
            os.kill(pid, signal.SIGCONT)
    return messages


@pytest.mark.parametrize("call", ["step", "load", "clip"])
def test_a_rank_that_has_given_up_waiting_is_out_and_so_is_the_one_that_was_stopped(call: str) -> None:
    """At once: messages that come late would answer other calls, and gloo ends a process whose messages do not fit."""
    first, second = run_processes(2, _stopped_for_a_while, call, expect_errors=True)
    assert "has been stopped for" in first[0] and "; restart all ranks" in first[0]
    assert first[1].startswith("this rank has left training, because rank 1")
    assert all("the other ranks have given up waiting for this one" in message for message in second)


def _stopped_in_an_exchange(rank: int, world_size: int) -> Any:
    param, opt = _optimizer(hang_timeout=0.5)
    pid, gather = _peer_pid(rank, opt), shared_memory_exchange.HostExchange.gather_runs

    def stop(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return gather(*args)

    if rank == 1:
        shared_memory_exchange.HostExchange.gather_runs = stop  # type: ignore[method-assign]
    param.grad = torch.ones(300)
    begin = time.monotonic()
    with _wake_later(pid, 20), pytest.raises(zero_opt.PeerSilent) as caught:
        opt.step()
    return str(caught.value), time.monotonic() - begin, pid


def test_a_rank_that_stops_in_an_exchange_in_memory_is_named_after_hang_timeout() -> None:
    message, seconds, pid = run_processes(2, _stopped_in_an_exchange, expect_errors=True)[0]
    assert 0.5 < seconds < MOST_SECONDS
    assert re.match(rf"rank 1 \(pid {pid}\) has been stopped for \d+ s while step 3 waits for it", message)


def _stopped_before_it_is_asked(rank: int, world_size: int, in_a_thread: bool) -> Any:
    asking.MARGIN_S = 1.0
    _, opt = _optimizer(**({"timeout": 2.0} if in_a_thread else {"hang_timeout": 0.5}))
    pid = _peer_pid(rank, opt)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    with _wake_later(pid, 30), ThreadPoolExecutor(1) as pool, pytest.raises(zero_opt.PeerLost) as caught:
        _ = pool.submit(opt.state_dict).result() if in_a_thread else opt.state_dict()
    return type(caught.value).__name__, str(caught.value), pid


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_stopped_rank_that_is_asked_for_its_state_is_not_said_to_have_ended(in_a_thread: bool) -> None:
    name, message, pid = run_processes(2, _stopped_before_it_is_asked, in_a_thread, expect_errors=True)[0]
    told = "is stopped" if in_a_thread else r"has been stopped for \d+ s while this rank waits for its message"
    assert name == "PeerSilent"
    assert re.match(rf"rank 1 \(pid {pid}\) {told}; let it go on \(kill -CONT\) and repeat the call", message)


def _silent(rank: int, world_size: int, missing: int) -> Any:
    param, opt = _optimizer(zero_opt.AtStep(), timeout=1.0)  # no exchange that may give the rank up first
    if rank == missing:
        time.sleep(1.8)
        return None
    param.grad = torch.ones(300)
    begin = time.monotonic()
    with pytest.raises(zero_opt.StepDesync) as caught:
        opt.step()
    assert isinstance(caught.value, zero_opt.PeerLost)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_does_not_come_is_named_with_its_last_step_on_every_other(missing: int) -> None:
    outcomes = run_processes(3, _silent, missing, expect_errors=True)
    for rank in {0, 1, 2} - {missing}:
        name, message, seconds = outcomes[rank]
        assert name == "PeerSilent" and seconds < MOST_SECONDS
        assert re.match(
            rf"rank {missing} \(pid \d+\) has not come to step 3 in [\d.]+ s, and its last step is 2: "
            rf"rank {rank} called step\(\), rank {missing} did not, of this optimizer; look at ",
            message,
        )
        assert "gloo" not in message[: message.index("Checks(timeout=")]  # its words come last, if it has said any


def _alone_between_steps(rank: int, world_size: int, call: str) -> str:
    """One rank alone calls, after three steps, what all ranks must call."""
    _, opt = _optimizer(timeout=1.0)
    saved = opt.state_dict()
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["done"], timedelta(seconds=300))
        return ""
    with pytest.raises(zero_opt.PeerSilent) as caught:
        {"load": lambda: opt.load_state_dict(saved), "consolidate": opt.consolidate_state_dict}[call]()
    store.set("done", "")
    return str(caught.value)


@pytest.mark.parametrize("call", ["load", "consolidate"])
def test_a_call_between_steps_counts_the_steps_before_it(call: str) -> None:
    message = run_processes(2, _alone_between_steps, call, expect_errors=True)[0]
    assert re.match(rf"rank 1 .* has not come to {call}_state_dict\(\) before step 3 .*its last step is 2", message)


def _alone(rank: int, world_size: int, call: str, patience_s: tuple[float, float]) -> Any:
    """Rank 0 calls something of all ranks while rank 1 reads its state, and goes on to the next backward.

    Args:
        patience_s: how long each rank waits for the other. Rank 1 waits in the exchange of that backward.
    """
    param, opt = _optimizer(timeout=patience_s[rank])
    store = dist.distributed_c10d._get_default_store()
    param.sum().backward()
    if rank == 1:
        assert len(opt.state_dict()["state"]) == 1
        opt.zero_grad()
        watch = opt._group.watch
        assert until(lambda: watch._marks._of([0])[0] > watch._entered, PATIENCE_S)  # rank 0 waits, and has said so
        param.sum().backward()
        store.wait(["told"], timedelta(seconds=PATIENCE_S))
        return None
    calls: dict[str, Any] = {
        "step()": opt.step,
        "clip_grad_norm_()": lambda: opt.clip_grad_norm_(1.0),
        "consolidate_state_dict()": opt.consolidate_state_dict,
    }
    with pytest.raises(zero_opt.PeerSilent) as caught:
        calls[call]()
    store.set("told", "")
    return str(caught.value)


# What a rank waits for that is given up last: longer than the other one can take.
UNENDING_S = 10 * PATIENCE_S


@pytest.mark.parametrize("call", ["step()", "clip_grad_norm_()", "consolidate_state_dict()"])
def test_a_call_on_one_rank_alone_says_what_was_called_and_where(call: str) -> None:
    message = run_processes(2, _alone, call, (5.0, UNENDING_S), expect_errors=True)[0]
    assert isinstance(message, str) and f"rank 0 called {call}, rank 1 did not" in message
    assert "whether all ranks step several optimizers in one order" in message


def test_a_call_on_one_rank_alone_is_named_also_where_the_other_rank_has_given_up_first() -> None:
    message = run_processes(2, _alone, "step()", (UNENDING_S, 5.0), expect_errors=True)[0]
    assert isinstance(message, str) and "rank 0 called step(), rank 1 did not" in message


def _killed(rank: int, world_size: int) -> str:
    param, opt = _optimizer()
    pids = opt._group.all_gather_bytes(str(os.getpid()).encode())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    param.grad = torch.ones(300)
    with pytest.raises(zero_opt.PeerLost) as caught:
        opt.step()
    return f"{pids[1].decode()} {caught.value}"


def test_a_killed_rank_is_named_at_once() -> None:
    begin = time.monotonic()
    message, killed = run_processes(2, _killed, expect_errors=True)
    assert time.monotonic() - begin < MOST_SECONDS
    assert isinstance(killed, Failure)
    pid, text = message.split(" ", 1)
    said = rf"rank 1 \(pid {pid}\) has ended while step 3 waits for it, and its last step is 2; restart all ranks"
    assert re.match(rf"{said} from the last checkpoint( \(.*\))?$", text), text


def _slow(rank: int, world_size: int) -> list[str]:
    stops.WARN_AFTER_S = 1.2
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_opt").addHandler(handler)
    param, opt = _optimizer()
    param.grad = torch.ones(300)
    if rank == 1:
        time.sleep(2)
    opt.step()
    opt.close()
    return records


def test_a_slow_rank_is_warned_about_once_by_rank_and_step_and_waited_for() -> None:
    records, none = run_processes(2, _slow)
    assert none == []
    (record,) = records
    said = r"step 3 has waited \d s for rank 1 \(pid \d+\); its last step is 2: rank 0 called step\(\), rank 1 did not"
    assert re.fullmatch(said + r", of this optimizer; do all step several optimizers in one order\?", record)


def _slow_in_an_exchange(rank: int, world_size: int, reduction: Any) -> list[str]:
    """Rank 1 takes part in the agreement at once, and in the exchange late."""
    stops.WARN_AFTER_S = 1.2
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    param, opt = _optimizer(reduction)
    logging.getLogger("zero_opt").addHandler(handler)
    param.grad = torch.ones(300)
    if rank == 1:
        reduce = opt._engine.reduction._reduce
        opt._engine.reduction._reduce = lambda *given, **named: (time.sleep(2.5), reduce(*given, **named))[1]
    opt.step()
    opt.close()
    return records


@pytest.mark.parametrize("exchange", ["auto", "backend"])
def test_an_exchange_that_waits_long_is_warned_about_once(exchange: str) -> None:
    reduction = zero_opt.AtStep(BUCKET_MB, exchange=exchange)
    records, none = run_processes(2, _slow_in_an_exchange, reduction)
    assert none == []
    (record,) = records
    assert re.fullmatch(r"an exchange of step 3 has waited \d s for rank 1 \(pid \d+\)", record)


def _stops_in_a_background_exchange(rank: int, world_size: int) -> Any:
    """Rank 1 stops after the agreement, before it sends anything; rank 0 waits for its own background thread."""
    param, opt = _optimizer(zero_opt.Overlapped(BUCKET_MB, exchange="backend"), hang_timeout=0.5)
    pid = _peer_pid(rank, opt)
    if rank == 1:
        reduce_runs, collect = pairwise_exchange.PairwiseExchange.reduce_runs, opt._engine.reduction.collect
        stopped = threading.Event()

        def stop(agreed: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            stopped.set()
            return collect(agreed)

        opt._engine.reduction.collect = stop
        pairwise_exchange.PairwiseExchange.reduce_runs = (  # type: ignore[method-assign]
            lambda *given: (stopped.wait(300), reduce_runs(*given))[1]
        )
    param.grad = torch.ones(300)
    with _wake_later(pid, 60), pytest.raises(zero_opt.PeerLost) as caught:
        opt.step()
    return str(caught.value)


def test_a_rank_that_stops_in_an_exchange_by_messages_is_named() -> None:
    message = run_processes(2, _stops_in_a_background_exchange, expect_errors=True)[0]
    assert re.match(r"rank 1 \(pid \d+\) has been stopped for \d+ s while step 3 waits for it", message), message


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C


def _leave_late() -> None:
    time.sleep(1)
    os._exit(0)


def _interrupted(rank: int, world_size: int, where: str) -> float | None:
    """Rank 0 waits for rank 1, which does not come; seconds between the signal and the exception."""
    exchange = "backend" if "backend" in where else "auto"
    param, opt = _optimizer(zero_opt.AtStep(BUCKET_MB, exchange=exchange))
    if rank == 1:
        if "agreed" in where:  # takes part in the agreement alone, so that the other waits in the exchange
            opt._engine.reduction._reduce = lambda *_, **__: _leave_late()
            param.grad = torch.ones(300)
            opt.step()
        _leave_late()
    sent = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    param.grad = torch.ones(300)
    threading.Timer(0.4, interrupt).start()
    calls = {"consolidate": opt.consolidate_state_dict, "state_dict": opt.state_dict}
    with pytest.raises(KeyboardInterrupt):
        calls.get(where, opt.step)()
    return time.monotonic() - sent[0]


@pytest.mark.parametrize("where", ["step", "consolidate", "agreed auto", "agreed backend"])
def test_ctrl_c_ends_a_wait_within_a_tenth_of_a_second(where: str) -> None:
    for _ in range(20):  # a twentieth is what a slice takes; a machine that has other things to do takes longer
        seconds, _ = run_processes(2, _interrupted, where, expect_errors=True)
        assert isinstance(seconds, float)
        if seconds < 0.1:
            return
    pytest.fail(f"the last of 20 took {seconds:.2f} s")


# ---------------------------------------------------------------------------------------------------------------------
# forks


def _in_a_fork(rank: int, world_size: int) -> list[str]:
    param, opt = _optimizer()
    calls = {
        "step": opt.step,
        "clip": lambda: opt.clip_grad_norm_(1.0),
        "consolidate": opt.consolidate_state_dict,
        "state_dict": opt.state_dict,
        "load": lambda: opt.load_state_dict(torch.optim.Adam([param]).state_dict()),
    }
    found = []
    for call in calls.values():
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            text = "no error"
            try:
                param.sum().backward()
                call()
            except zero_opt.ZeroOptError as error:
                text = f"{type(error).__name__}: {error}"
            os.write(theirs, text.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(theirs)
        found.append(os.read(ours, 4096).decode())
        os.close(ours)
    param.sum().backward()
    opt.step()  # the parent's connections are as they were
    opt.close()
    return found


def test_a_forked_child_gets_a_typed_error_and_disturbs_nobody() -> None:
    for found in run_processes(2, _in_a_fork):
        for text in found:
            assert re.match("(ProcessGroupError|StateNotConsolidated): .*forked from", text), text


def _patient(rank: int, world_size: int, seconds: float | None) -> Any:
    """What has ended a thread while a rank asks for state, alone, beside one that has closed; and who still runs."""
    ended_by: list[str] = []
    threading.excepthook = lambda given: ended_by.append(f"{given.thread} ended with {given.exc_value!r}")
    checks = {} if seconds is None else {"timeout": seconds, "hang_timeout": seconds}
    _, opt = _optimizer(**checks)
    if rank == 1:
        opt.close()
    torch.distributed.barrier()
    step = None if ended_by or rank else opt.state_dict()["state"][0]["step"].item()
    torch.distributed.barrier()
    opt.close()
    for thread in threading.enumerate():
        if thread.name.startswith("zero_opt state"):
            thread.join(0 if ended_by else PATIENCE_S)
            assert ended_by or not thread.is_alive()
    return step, ended_by


@pytest.mark.parametrize("seconds", [1e6, 9.3e9, 1e12, 1e300, None])
def test_no_number_of_seconds_ends_a_thread(seconds: float | None) -> None:
    """More than the system can count; for ``None``, of the process group."""
    bound = 5e9 if seconds is None else None  # with twice as much torch's own collectives end at once
    results = run_processes(2, _patient, seconds, group_timeout=bound)
    assert results == [(3.0, []), (None, [])]


def test_a_disk_may_be_given_any_number_of_seconds(tmp_path: Path) -> None:
    param = torch.nn.Parameter(torch.ones(300))
    offload = zero_opt.NVMeOffload(tmp_path, hang_timeout=1e12)
    opt = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, fused=True, offload=offload)
    param.grad = torch.ones(300)
    opt.step()
    assert opt.state_dict()["state"][0]["step"] == 1
    opt.close()


def test_without_descriptors_no_rank_is_taken_for_one_that_has_ended() -> None:
    here = process_identity.ProcessIdentity.of_this_process()
    assert here.is_near(here) and here.state() == "R"
    assert here._replace(started=here.started + 1).state() == "X", "another process has the pid"
    assert process_identity.ProcessIdentity(here.host, 2**22 + 1, 5).state() == "X"
    with no_descriptors():
        assert here.state() == "?"
        nameless = process_identity.ProcessIdentity.of_this_process()
    assert not nameless.is_near(nameless) and not nameless.is_near(here) and not here.is_near(nameless)


def test_a_process_whose_clock_has_another_offset_is_not_near() -> None:
    """Starting times depend on the reader's time namespace: a living rank of another one would seem to have ended."""
    here = process_identity.ProcessIdentity.of_this_process()
    program = "from zero_opt.comm.process_identity import ProcessIdentity as P; print([*P.of_this_process()])"
    done = subprocess.run(
        ["unshare", "--time", "--boottime", "100000", sys.executable, "-c", program], capture_output=True, text=True
    )
    if "unshare" in done.stderr:
        pytest.skip(f"time namespaces are not permitted here: {done.stderr}")
    there = process_identity.ProcessIdentity(*ast.literal_eval(done.stdout))
    assert there.pid and there.started > here.started + 90_000, "the clock is shifted"
    assert not there.is_near(here) and not here.is_near(there)
    assert there.is_near(there) and here.is_near(here)
