"""state_dict() where a step is pending (``delay=1``) and a rank has left, without which it stays pending."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import run_processes
from test.support.stepped import make_stepped, take_step

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda params, optimizer: None,
    "step": take_step,
    "flush": lambda params, optimizer: optimizer.flush(),
    "consolidate": lambda params, optimizer: optimizer.consolidate_state_dict(),
    "clip": lambda params, optimizer: optimizer.clip_grad_norm_(1.0),
}


def _leave(optimizer: Any, how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "closed":
        optimizer.close()


def _one_leaves(rank: int, world_size: int, how: str, call: str) -> str:
    params, optimizer = make_stepped(3, offload=zero_opt.WorkerOffload(delay=1))
    if rank == 1:
        _leave(optimizer, how)
        return ""
    if call == "none":
        watch: Any = optimizer._engine._groups._watch  # type: ignore[union-attr]
        while not watch.departures.knows(1):
            time.sleep(0.01)
    else:
        with pytest.raises(zero_opt.PeerLost):
            CALLS[call](params, optimizer)
    with pytest.raises(zero_opt.PeerLost) as caught:
        optimizer.state_dict()
    return str(caught.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_names_the_rank_that_has_left(world_size: int, how: str, call: str) -> None:
    found = run_processes(world_size, _one_leaves, how, call, expect_errors=how == "killed")
    for said in found[:1] + found[2:]:
        left = (
            r"rank 1 (\(pid \d+\) )?has ended" if how == "killed" else "rank 1 has closed this optimizer after 3 steps"
        )
        assert re.match(f"(a step is pending, and flush|this rank's state is that of no step).*: {left}", said), said


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _read_afterwards(rank: int, world_size: int, number: int) -> str:
    checks = zero_opt.Checks(hang_timeout=1.0)
    params, optimizer = make_stepped(3, offload=zero_opt.WorkerOffload(delay=1), checks=checks)
    if rank == 1 and number != signal.SIGINT:
        os.kill(os.getpid(), number)
    if number == signal.SIGINT:
        optimizer._engine.placement.bring_in = _interrupt  # type: ignore[union-attr]
    ended = KeyboardInterrupt if number == signal.SIGINT else zero_opt.PeerLost
    with pytest.raises(ended) as raised:
        optimizer.flush()
    assert isinstance(raised.value, zero_opt.PeerSilent) == (number == signal.SIGSTOP)
    with torch.no_grad(), pytest.raises(zero_opt.StepPending) as caught:
        params[0].clone()
    optimizer.close()
    with torch.no_grad():
        assert params[0].clone().isfinite().all()
    return str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGINT])
def test_a_read_afterwards_is_told_to_close(number: int) -> None:
    """The other rank has ended, or is stopped; or this one was interrupted in a call of all ranks."""
    hangs = {1} if number == signal.SIGSTOP else set()
    said = run_processes(2, _read_afterwards, number, expect_errors=number == signal.SIGKILL, may_hang=hangs)[0]
    assert "ranks have parted: close()" in said and "flush" not in said
