"""Calls of several parts that an exception ends on one rank, between two messages, are the last ones there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_opt
from test.support.harness import run_processes
from test.support.stepped import make_stepped
from zero_opt.comm.groups import Group


def _interrupt_after(messages: int) -> None:
    """Have a Ctrl-C fall on this rank just after so many messages."""
    original, left = Group.all_gather_bytes, itertools.count(messages - 1, -1)

    def gathered(*given: Any, **options: Any) -> list[bytes]:
        found = original(*given, **options)
        if next(left) == 0:
            raise KeyboardInterrupt
        return found

    Group.all_gather_bytes = gathered  # type: ignore[method-assign]


def _interrupted(rank: int, world_size: int, call: str, messages: int) -> str:
    torch.set_num_threads(1)
    _, optimizer = make_stepped(2)
    rows: Any = zero_opt.sharded_state_dict(optimizer)
    calls: dict[str, Callable[[], Any]] = {
        "sharded_state_dict": lambda: zero_opt.sharded_state_dict(optimizer),
        "load_sharded_state_dict": lambda: zero_opt.load_sharded_state_dict(optimizer, rows),
    }
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        with pytest.raises(zero_opt.PeerLost) as caught:
            calls[call]()
        store.set("lost", "")
        return str(caught.value)
    _interrupt_after(messages)
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    store.wait(["lost"])
    with pytest.raises(zero_opt.PeerSilent) as refused:
        calls[call]()
    return str(refused.value)


@pytest.mark.parametrize("call", ["sharded_state_dict", "load_sharded_state_dict"])
def test_after_its_first_message_a_call_is_the_last(call: str) -> None:
    lost, refused = run_processes(2, _interrupted, call, 1)
    assert lost.startswith("rank 1 has left training after 2 steps, because an exception there"), lost
    assert refused.startswith(f"this rank has left training, because KeyboardInterrupt has ended {call}() in"), refused
