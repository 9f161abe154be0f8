"""A rank of another host that is killed as state travels: the error names the call that waits, not a step."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import run_processes
from test.support.stepped import make_stepped, take_step
from zero_opt.comm import process_identity
from zero_opt.comm.groups import Group

CALLS = {"consolidate_state_dict()": "consolidate_state_dict()", "load_sharded_state_dict()": "load_state_dict()"}


def _killed(rank: int, world_size: int, call: str) -> str:
    process_identity.host_if_known = lambda: f"host {rank}"
    torch.set_num_threads(1)
    params, optimizer = make_stepped(2)
    take_step(params, optimizer)
    rows: Any = zero_opt.sharded_state_dict(optimizer)
    if rank:
        Group.send_to = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    calls: dict[str, Callable[[], None]] = {
        "consolidate_state_dict()": lambda: optimizer.consolidate_state_dict(to=0),
        "load_sharded_state_dict()": lambda: zero_opt.load_sharded_state_dict(optimizer, rows),
    }
    with pytest.raises(zero_opt.PeerLost) as caught:
        calls[call]()
    return str(caught.value)


@pytest.mark.parametrize("call", CALLS)
def test_the_call_that_waits_is_named(call: str) -> None:
    text = run_processes(2, _killed, call, expect_errors=True)[0]
    assert re.match(r"rank 1 has ended, or its host does not answer, while ", text), text
    assert f"while {CALLS[call]} before step 3 waits for it" in text, text
