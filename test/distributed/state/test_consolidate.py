"""Bringing state to one rank: what cannot be sent, and ranks that do not mean the same one."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise, run_processes
from test.support.stepped import lost_in, make_stepped
from zero_opt.comm import process_identity
from zero_opt.state import consolidate


class Historian(torch.optim.Optimizer):
    """Keeps of its first parameter what has no place in a message."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param]["seen"] = [1.0, 2.0] if param.numel() == 3 else 1.0


def _stepped(cls: type[torch.optim.Optimizer]) -> zero_opt.ShardedOptimizer:
    params = [nn.Parameter(torch.ones(numel)) for numel in (3, 5)]
    optimizer = zero_opt.ShardedOptimizer(params, cls)
    torch.autograd.backward(params, [torch.ones_like(param) for param in params])
    optimizer.step()
    return optimizer


def _consolidate_a_list(rank: int, world_size: int) -> str:
    optimizer = _stepped(Historian)
    with pytest.raises(zero_opt.StateDictError, match="'seen' of parameter 0 is a list"):
        optimizer.state_dict()
    with pytest.raises(zero_opt.StateDictError) as caught:
        optimizer.consolidate_state_dict()
    optimizer.close()
    return str(caught.value)


def test_state_that_cannot_be_sent_is_named_on_every_rank() -> None:
    for message in run_processes(2, _consolidate_a_list):
        assert "'seen' of parameter 0 is a list" in message


def _consolidate_apart(rank: int, world_size: int, to: Any) -> str:
    optimizer = _stepped(torch.optim.Adam)
    with pytest.raises(zero_opt.ZeroOptError) as caught:
        optimizer.consolidate_state_dict(to=to[rank])
    optimizer.consolidate_state_dict(to=numpy.int64(1))  # type: ignore[arg-type]
    assert rank == 0 or len(optimizer.state_dict()["state"]) == 2
    optimizer.close()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("to", "what"),
    [
        ((0, 1), "RankMismatch: rank to consolidate to: 0 on rank 0, 1 on rank 1"),
        ((0, 2), "ConfigError: rank 1: to must be a rank of the group, 0 to 1, got 2"),
        ((None, 0), "ConfigTypeError: to must be a rank of the group"),
    ],
)
def test_ranks_that_mean_different_ones_are_told(to: Any, what: str) -> None:
    messages = run_processes(2, _consolidate_apart, to)
    assert messages[0].startswith(what)
    kind, _, rest = what.partition(": ")
    assert messages[1].startswith(kind)
    assert rest.removeprefix("rank 1: ") in messages[1]


def _consolidate_and_flush(rank: int, world_size: int) -> str:
    _, optimizer = make_stepped(2, offload=zero_opt.WorkerOffload(delay=1))
    with pytest.raises(zero_opt.RankMismatch) as caught:
        optimizer.flush() if rank else optimizer.consolidate_state_dict()
    optimizer.close()
    return str(caught.value)


def test_it_is_named_where_another_rank_only_brings_in_a_pending_step() -> None:
    for message in run_processes(2, _consolidate_and_flush):
        assert message.startswith("rank 0 called consolidate_state_dict() where rank 1 called flush()")


def _consolidate_and_close(rank: int, world_size: int) -> Any:
    optimizer = _stepped(torch.optim.Adam)
    optimizer.consolidate_state_dict(to=0)
    before = optimizer.state_dict()
    optimizer.close()
    if rank == 0:
        return before, optimizer.state_dict()
    with pytest.raises(zero_opt.StateNotConsolidated, match="closed"):
        optimizer.state_dict()
    return before, before


def test_what_was_consolidated_is_there_after_the_end() -> None:
    (before, after), _ = run_processes(2, _consolidate_and_close)
    assert len(after["state"]) == 2
    assert_bitwise(after, before)


def _one_stops_before_it_sends(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 0 waits for the state of rank 2, which is on another host, and rank 1 for both, one call later."""
    process_identity.host_if_known = lambda: f"host {rank // 2}"
    _, optimizer = make_stepped(2, checks=zero_opt.Checks(timeout=12.0))
    if rank == 2:
        consolidate.message_to_send = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[attr-defined]
    return lost_in(lambda: optimizer.consolidate_state_dict(to=0))


def test_a_rank_that_stops_before_it_sends_its_state_is_named_alone() -> None:
    found = run_processes(3, _one_stops_before_it_sends, timeout=PATIENCE_S, expect_errors=True, may_hang={2})
    for name, text in found[:2]:
        assert name == "PeerSilent"
        assert text.startswith("rank 2 has not "), text
        assert "not come to consolidate" not in text, text  # all have come to that
    assert found[1][1].startswith("rank 2 has not gone on in consolidate_state_dict() before step 2 in "), found[1][1]
