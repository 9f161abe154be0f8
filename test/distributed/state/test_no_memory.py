"""State of all ranks that one rank has no memory for: every rank hears of it, and can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import run_processes
from test.support.stepped import make_stepped, take_step
from zero_opt.optimizer import contents
from zero_opt.state.consolidate import IncomingState
from zero_opt.state.row_sharded import IncomingRows


def _too_much(*_: Any) -> None:
    torch.empty(1 << 56, dtype=torch.uint8, device="cpu")


def _without_memory(
    rank: int, world_size: int, call: Callable[[Any], Any], where: type, everywhere: bool
) -> tuple[str, float]:
    params, optimizer = make_stepped(2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(where, "make", _too_much)
        message = ""
        if everywhere or rank == 1:
            with pytest.raises(zero_opt.OutOfMemory, match=r"gets no host memory; .*ulimit -a") as caught:
                call(optimizer)
            message = str(caught.value)
    take_step(params, optimizer)
    call(optimizer)
    optimizer.consolidate_state_dict(to=0)
    step = float(optimizer.state_dict()["state"][0]["step"].item())
    optimizer.close()
    return message, step


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda optimizer: optimizer.consolidate_state_dict(to=1), IncomingState),
        (zero_opt.sharded_state_dict, IncomingRows),
    ],
    ids=["consolidate", "rows"],
)
def test_every_rank_hears_of_it(call: Callable[[Any], Any], where: type, world_size: int) -> None:
    found = run_processes(world_size, _without_memory, call, where, True)
    own = found[1][0]
    assert own
    assert found == [(own if rank == 1 else f"rank 1: {own}", 3.0) for rank in range(world_size)]


def test_of_a_rank_that_reads_state_alone() -> None:
    found = run_processes(2, _without_memory, lambda optimizer: optimizer.state_dict(), IncomingState, False)
    assert [step for _, step in found] == [3.0, 3.0]
    assert found[1][0]


def _values_without_memory(rank: int, world_size: int) -> str:
    params, optimizer = make_stepped(2)
    added = [torch.nn.Parameter(torch.ones(20))]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(contents, "value_digest", _too_much)
        with pytest.raises(zero_opt.OutOfMemory, match="the comparison of parameters between ranks") as caught:
            optimizer.add_param_group({"params": added})
    optimizer.add_param_group({"params": added})
    take_step([*params, *added], optimizer)
    optimizer.close()
    return str(caught.value)


def test_to_compare_values_with() -> None:
    first, second = run_processes(2, _values_without_memory)
    assert first == f"rank 1: {second}"
