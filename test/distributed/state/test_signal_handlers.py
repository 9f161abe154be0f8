"""state_dict() in a signal handler, wherever it interrupts the program: an error that says what to do, and no wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.support.harness import run_processes
from test.support.stepped import make_stepped, service_of, take_step


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGALRM)


def _errors_in_a_handler(call: Callable[[], Any]) -> list[str]:
    """Have SIGALRM call something; what it has raised so far."""
    said: list[str] = []

    def handler(*_: Any) -> None:
        try:
            call()
        except zero_opt.ZeroOptError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")

    signal.signal(signal.SIGALRM, handler)
    return said


def _inside_a_pull(rank: int, world_size: int) -> Any:
    params, optimizer = make_stepped(2)
    said, found = _errors_in_a_handler(optimizer.state_dict), None
    if rank == 0:
        asked: Any = service_of(optimizer)
        ask = asked._questions._ask

        def interrupted(*given: int) -> Any:
            _interrupt()
            return ask(*given)

        asked._questions._ask = interrupted
        found = len(optimizer.state_dict()["state"])
        asked._questions._ask = ask
        assert len(optimizer.state_dict()["state"]) == found
    take_step(params, optimizer)
    return said, found


def test_inside_state_dict_it_is_refused_and_the_outer_one_goes_on() -> None:
    said, found = run_processes(2, _inside_a_pull)[0]
    assert found == 4
    (text,) = said
    assert text.startswith("StepDesync: state_dict() was called inside state_dict()") and "set a flag" in text


def _inside_a_look_at_state(rank: int, world_size: int) -> list[str]:
    params, optimizer = make_stepped(2)
    said = _errors_in_a_handler(optimizer.state_dict)
    visible = optimizer._engine.parts.visible  # type: ignore[union-attr]
    adopt_slice = visible._adopt_slice

    def interrupted(*given: Any) -> bool:
        visible._adopt_slice = adopt_slice
        _interrupt()
        return adopt_slice(*given)

    visible._adopt_slice = interrupted  # type: ignore[method-assign]
    visible._adopted.forget()  # so that every slice is looked at
    take_step(params, optimizer)
    dist.barrier()
    assert len(optimizer.state_dict()["state"]) == 4
    dist.barrier()
    return said


def test_while_state_is_compared_it_is_refused() -> None:
    for said in run_processes(2, _inside_a_look_at_state):
        assert len(said) == 1 and said[0].startswith("StepDesync: ") and "set a flag" in said[0], said


OFFLOADS = {
    "none": None,
    "delay": zero_opt.WorkerOffload(delay=1),
    "speculate": zero_opt.WorkerOffload(speculate=True),
}


def _inside_a_step(rank: int, world_size: int, offload: str) -> list[str]:
    params, optimizer = make_stepped(2, offload=OFFLOADS[offload])
    said = _errors_in_a_handler(optimizer.state_dict)
    engine: Any = optimizer._engine
    end, show = engine._end_step, engine._show_state

    def interrupted(call: Callable[..., None]) -> Callable[..., None]:
        return lambda *given: (_interrupt(), call(*given), _interrupt())[1]

    engine._end_step = lambda *given: (_interrupt(), end(*given))[1]
    engine._show_state = interrupted(show)  # half of what is shown is that of the step before
    take_step(params, optimizer)
    del engine._end_step, engine._show_state
    take_step(params, optimizer)  # the ranks agree on what was dropped
    optimizer.flush()
    dist.barrier()
    assert optimizer.state_dict()["state"][0]["step"] == 4
    dist.barrier()
    return said


@pytest.mark.parametrize("offload", OFFLOADS)
def test_inside_a_step_it_is_refused_and_names_the_step(offload: str) -> None:
    for said in run_processes(2, _inside_a_step, offload):
        assert len(said) == 3
        for text in said:
            assert text.startswith("StepDesync: state_dict() was called while step 2 is being taken"), said
            assert "set a flag" in text


def _as_a_step_ends(rank: int, world_size: int) -> list[str]:
    """A signal interrupts the end of step(), as it begins to watch parameters that are still on their way.

    Its handler waits for all of them.
    """
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    reduction = zero_opt.Overlapped(1e-4, overlap_param_gather=net)
    optimizer = zero_opt.ShardedOptimizer(net.parameters(), torch.optim.AdamW, reduction=reduction)
    said = _errors_in_a_handler(optimizer.state_dict)
    late: Any = optimizer._engine.gather._late  # type: ignore[union-attr]
    mark = late.mark

    def interrupted(params: Any) -> None:
        late.mark = mark
        _interrupt()
        mark(params)

    if rank == 0:
        late.mark = interrupted
    for _ in range(2):
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    optimizer.flush()
    dist.barrier()
    return said


def test_as_a_step_ends_it_does_not_break_the_step() -> None:
    assert run_processes(2, _as_a_step_ends) == [[""], []]
