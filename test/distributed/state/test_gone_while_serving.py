"""Ranks that are gone while they serve their state, after they have left training: who is named, and who goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from test.support.stepped import make_stepped, service_of, take_step
from zero_opt.comm import process_identity
from zero_opt.comm.departures import How
from zero_opt.system.waiting import until


def _killed_while_it_serves(rank: int, world_size: int, near: bool, folder: str) -> Any:
    """All but rank 0 have closed, and serve on, until rank 1 is killed."""
    if not near:
        process_identity.host_if_known = lambda: f"host {rank}"
    _, optimizer = make_stepped(2)
    over = Path(folder) / "over"
    if rank:
        optimizer.close()
        if rank == 1:
            (Path(folder) / "closed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        assert until(over.exists, PATIENCE_S)
        return None
    assert until((Path(folder) / "closed").exists, PATIENCE_S)
    time.sleep(0.5)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.state_dict()
    over.touch()
    return str(caught.value)


@pytest.mark.parametrize("near", [True, False], ids=["one host", "hosts"])
def test_a_rank_that_is_killed_while_it_serves_is_named_and_not_one_that_has_closed(near: bool, tmp_path: Path) -> None:
    said = run_processes(3, _killed_while_it_serves, near, str(tmp_path), expect_errors=True)[0]
    ends = (
        r" \(pid \d+\) has ended while"
        if near
        else " has ended(, or its host does not answer, while| or does not answer)"
    )
    assert re.match(rf"rank 1{ends}", said), said


def _interrupted_and_killed(rank: int, world_size: int, folder: str) -> Any:
    """Rank 1 has left training and still serves; rank 2 has closed, and is killed."""
    _, optimizer = make_stepped(2)
    killed, over = Path(folder) / "killed", Path(folder) / "over"
    dist.barrier()
    if rank == 1:
        optimizer._engine._groups.control.watch.interrupted(KeyboardInterrupt())  # type: ignore[union-attr]
    elif rank == 2:
        optimizer.close()
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        assert until(killed.exists, PATIENCE_S)
        time.sleep(0.5)
        with pytest.raises(zero_opt.PeerLost) as caught:
            optimizer.state_dict()
        over.touch()
        return str(caught.value)
    assert until(over.exists, PATIENCE_S)
    return None


def test_a_rank_that_was_interrupted_serves_and_is_not_named_for_one_that_was_killed(tmp_path: Path) -> None:
    said = run_processes(3, _interrupted_and_killed, str(tmp_path), expect_errors=True)[0]
    assert re.match(r"rank 2 \(pid \d+\) has ended while ", said), said


def _ends_at_once_after_close(rank: int, world_size: int) -> Any:
    """Whether this rank has left training, once rank 1 has closed and ended without serving its state."""
    _, optimizer = make_stepped(2)
    departures = optimizer._engine._groups.control.watch.departures  # type: ignore[union-attr]
    left, leave = list[int](), departures.leave

    def noted() -> None:
        left.append(rank)
        leave()

    departures.leave = noted
    dist.barrier()
    if rank == 1:
        optimizer.close()
        os._exit(0)
    assert until(lambda: departures.first_gone() is not None, PATIENCE_S)
    time.sleep(0.5)
    return left


def test_ranks_go_on_with_a_step_that_one_has_taken_which_closed_and_ended() -> None:
    found = run_processes(3, _ends_at_once_after_close, expect_errors=True)
    assert found[0] == found[2] == []


def _killed_while_it_sends(rank: int, world_size: int) -> Any:
    """What rank 0 and the others are told, whose ring is slower than the message that breaks off."""
    process_identity.host_if_known = lambda: f"host {rank}"
    params, optimizer = make_stepped(2)
    service: Any = service_of(optimizer)
    find_lost = service._ring._find_lost
    service._ring._find_lost = lambda: (time.sleep(0.5), find_lost())
    if rank == 2:
        service._send_elements = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    calls: list[Any] = [optimizer.state_dict] * 2 if rank == 0 else []
    said = []
    for call in [*calls, lambda: take_step(params, optimizer)]:
        with pytest.raises(zero_opt.PeerLost) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_a_rank_that_is_killed_while_it_sends_its_state_is_named_by_all() -> None:
    found = run_processes(3, _killed_while_it_sends, expect_errors=True)
    for said in [*found[0], *found[1]]:
        assert said.startswith("rank 2 has ended, or its host does not answer, while "), found


def _fails_beside_one_that_has_closed(rank: int, world_size: int, folder: str) -> str:
    """What rank 0 is told, once rank 2 has ended with an exception, and rank 1, which has closed, because of that."""
    _, optimizer = make_stepped(2)
    ended, pids = Path(folder) / "ended", optimizer._group.all_gather_bytes(str(os.getpid()).encode())
    if rank == 2:
        optimizer._engine._groups.service.abandon(How.FAILED)  # type: ignore[union-attr]
        assert until(ended.exists, PATIENCE_S)
        return ""
    departures = optimizer._engine._groups.control.watch.departures  # type: ignore[union-attr]
    assert until(lambda: departures.knows(2), PATIENCE_S)
    if rank == 1:
        optimizer.close()
        os._exit(0)
    assert until(lambda: departures.knows(1) and process_identity._stat(int(pids[1]))[0] in "ZXx", PATIENCE_S)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.state_dict()
    ended.touch()
    return str(caught.value)


def test_a_rank_that_has_failed_is_named_and_not_one_that_has_closed_and_ended_since(tmp_path: Path) -> None:
    said = run_processes(3, _fails_beside_one_that_has_closed, str(tmp_path), expect_errors=True)[0]
    assert re.match(r"rank 2 has ended its program with an exception", said), said
