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


@pytest.mark.sampled(10)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_names_the_rank_that_has_left(world_size: int, how: str, call: str) -> None:
    found = run_processes(world_size, _one_leaves, how, call, expect_errors=how == "killed")
    for said in found[:1] + found[2:]:
        left = (
            r"rank 1 (\(pid \d+\) )?has ended" if how == "killed" else "rank 1 has closed this optimizer after step 2"
        )
        assert re.match(f"(a step is pending, and flush|this rank's state is that of no step).*: {left}", said), said


def _read_afterwards(rank: int, world_size: int) -> str:
    params, optimizer = make_stepped(3, offload=zero_opt.WorkerOffload(delay=1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zero_opt.PeerLost):
        optimizer.flush()
    with torch.no_grad(), pytest.raises(zero_opt.StepPending) as caught:
        params[0].clone()
    optimizer.close()
    with torch.no_grad():
        assert params[0].clone().isfinite().all()
    return str(caught.value)


def test_a_read_afterwards_is_told_to_close() -> None:
    said = run_processes(2, _read_afterwards, expect_errors=True)[0]
    assert "a rank is lost: close()" in said and "flush" not in said
