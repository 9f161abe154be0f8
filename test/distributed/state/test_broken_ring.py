"""Connections for state_dict() that a rank has broken: what the others are told then, of state and in training."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from test.support.stepped import make_stepped, service_of, take_step
from zero_opt.comm import process_exit, process_identity
from zero_opt.system.waiting import until

CONSOLIDATE = r"the ranks' connections for state_dict\(\) have broken .*call opt\.consolidate_state_dict"


def _told(call: Callable[[], Any]) -> str:
    with pytest.raises(zero_opt.PeerLost) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def _stop_until(done: Callable[[], bool]) -> None:
    """Stop this process, from this thread on, until another one finds that it is done."""
    child = os.fork()
    if child == 0:
        until(done, PATIENCE_S)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    os.waitpid(child, 0)


def _broken_by_one(rank: int, world_size: int, forks: bool) -> list[str]:
    """What is said of rank 1, which has broken its connections, and lives: by state_dict(), and once it has closed."""
    params, optimizer = make_stepped(2)
    child = subprocess.Popen(["sleep", f"{PATIENCE_S}"], close_fds=False) if forks and rank == 1 else None
    service: Any = service_of(optimizer)
    dist.barrier()
    if rank == 1:
        service._side.interrupt()
    said = [_told(optimizer.state_dict) for _ in range(2)]
    dist.barrier()
    take_step(params, optimizer)
    dist.barrier()
    if rank == 1:
        optimizer.close()
    else:
        said.append(_told(lambda: take_step(params, optimizer)))
    dist.barrier()
    if child is not None:
        child.kill()
        child.wait()
    return said


@pytest.mark.parametrize("forks", [False, True], ids=["", "beside a child that holds the connections"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_whose_connections_one_has_broken_train_on_and_are_told_what_to_do(world_size: int, forks: bool) -> None:
    for rank, (*asked, stepped) in enumerate(run_processes(world_size, _broken_by_one, forks)):
        if rank == 1:
            asked, stepped = [*asked, stepped], ""
        assert all(re.match(f"PeerLost: {CONSOLIDATE}", text) for text in asked), asked
        assert rank == 1 or re.match(r"PeerLost: rank 1 has closed this optimizer after 3 steps", stepped), stepped


def _one_holds_the_ring(rank: int, world_size: int, folder: str) -> str:
    """What rank 1 is told of rank 2, which is stopped on another host, and has its question to rank 0."""
    process_identity.host_if_known = lambda: f"host {rank // 2}"
    _, optimizer = make_stepped(2, checks=zero_opt.Checks(timeout=3.0))
    optimizer.flush()
    dist.barrier()
    told = os.path.join(folder, "told")
    if rank == 2:
        _stop_until(lambda: os.path.exists(told))
    said = ""
    if rank == 1:
        said = _told(optimizer.state_dict)
        open(told, "w").close()
    dist.barrier()
    optimizer.close()
    return said


def test_the_rank_that_holds_a_question_is_named_and_not_the_one_that_has_not_heard_it(tmp_path: Any) -> None:
    said = run_processes(3, _one_holds_the_ring, str(tmp_path))[1]
    assert re.match(r"PeerSilent: rank 2 has not answered in 3 s", said), said


def _gives_up_and_ends(rank: int, world_size: int, folder: str) -> str:
    """What rank 0 is told of rank 1, which has given up asking it for state, and has ended in order."""
    params, optimizer = make_stepped(2, checks=zero_opt.Checks(hang_timeout=0.5))
    told = os.path.join(folder, "told")
    dist.barrier()
    if rank == 0:
        _stop_until(lambda: os.path.exists(told))
        return _told(lambda: take_step(params, optimizer))
    assert "repeat the call" in _told(optimizer.state_dict)
    service: Any = service_of(optimizer)
    service.abandon(process_exit.How.ENDED)
    open(told, "w").close()
    return ""


def test_a_rank_that_has_given_up_asking_and_ends_in_order_has_not_failed(tmp_path: Any) -> None:
    said = run_processes(2, _gives_up_and_ends, str(tmp_path))[0]
    assert re.match(r"PeerLost: rank 1 has ended its program after 2 steps", said), said


def _closes_while_it_serves(rank: int, world_size: int, folder: str) -> Any:
    """Rank 0 has closed, and still takes state of rank 1, on another thread, as that one closes last."""
    _, optimizer = make_stepped(2)
    service: Any = service_of(optimizer)
    begun, fetch = os.path.join(folder, "begun"), service._questions._fetch
    dist.barrier()
    if rank == 1:
        assert until(lambda: os.path.exists(begun), PATIENCE_S)
        optimizer.close()
        assert until(lambda: not service._ring.thread.is_alive(), PATIENCE_S)
        return None

    def fetch_late(*given: Any) -> None:
        open(begun, "w").close()
        assert until(lambda: 1 not in service._ring.open, PATIENCE_S)
        time.sleep(1.5)  # longer than messages have to arrive before connections are broken
        fetch(*given)

    service._questions._fetch = fetch_late
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(optimizer.state_dict)
        assert until(lambda: os.path.exists(begun), PATIENCE_S)
        optimizer.close()
        return len(state.result(PATIENCE_S)["state"])


def test_the_last_rank_that_closes_ends_the_ring_once_nobody_takes_its_state(tmp_path: Any) -> None:
    assert run_processes(2, _closes_while_it_serves, str(tmp_path))[0] > 0


def _ends_beside_a_lost_rank(rank: int, world_size: int) -> list[BaseException | None]:
    """Rank 1 closes first. Rank 0 closes last, and its message to rank 1 fails."""
    raised: list[BaseException | None] = []
    threading.excepthook = lambda arguments: raised.append(arguments.exc_value)
    _, optimizer = make_stepped(2)
    service: Any = service_of(optimizer)
    service._ring.wait_passed = mock.Mock(side_effect=zero_opt.PeerLost("rank 1 has ended"))
    dist.barrier()
    if rank == 0:
        assert until(lambda: not service._ring.open, PATIENCE_S)
    optimizer.close()
    assert until(lambda: service not in process_exit.running, PATIENCE_S)
    return raised


def test_no_thread_fails_where_a_rank_is_lost_at_the_end() -> None:
    assert run_processes(2, _ends_beside_a_lost_rank) == [[], []]
