"""state_dict() of a rank alone, on a thread of the user's, while another one trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import run_processes
from zero_opt.state import full_state


class Held(torch.optim.SGD):
    """Waits in its step."""

    entered = threading.Event()
    may_go_on = threading.Event()

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.entered.set()
        assert self.may_go_on.wait(PATIENCE_S)
        return found


class Failing(torch.optim.SGD):
    """Cannot step what is larger than one."""

    def step(self, closure: Any = None) -> Any:
        if any(float(param.detach().sum()) > 6 for group in self.param_groups for param in group["params"]):
            raise ZeroDivisionError
        return super().step(closure)


def _made(cls: Callable[..., Any]) -> tuple[list[torch.nn.Parameter], zero_opt.ShardedOptimizer]:
    params = [torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(6))]
    offload = zero_opt.CPUOffload(subgroup_mb=0.001)
    return params, zero_opt.ShardedOptimizer(params, cls, lr=0.1, momentum=0.9, offload=offload)


def _backward(params: list[torch.nn.Parameter]) -> None:
    torch.stack([(param * param).sum() for param in params]).sum().backward()


def _a_step_that_is_being_taken_is_not_mixed_with_the_one_before(rank: int, world_size: int) -> None:
    Held.entered, Held.may_go_on = threading.Event(), threading.Event()
    params, optimizer = _made(Held)
    _backward(params)
    training = threading.Thread(target=optimizer.step)
    training.start()
    try:
        assert Held.entered.wait(PATIENCE_S)
        with pytest.raises(zero_opt.StepDesync, match="while step 0 is being taken"):
            optimizer.state_dict()
    finally:
        Held.may_go_on.set()
        training.join(PATIENCE_S)
    assert set(optimizer.state_dict()["state"]) == {0, 1}
    optimizer.close()


def _a_step_waits_for_a_thread_that_reads_the_state(rank: int, world_size: int) -> None:
    monkeypatch = pytest.MonkeyPatch()
    params, optimizer = _made(torch.optim.SGD)
    _backward(params)
    optimizer.step()
    reading, may_go_on, order = threading.Event(), threading.Event(), list[str]()
    consolidated = full_state.consolidated

    def held(*args: Any) -> Any:
        reading.set()
        assert may_go_on.wait(PATIENCE_S)
        found = consolidated(*args)
        order.append("read")
        return found

    monkeypatch.setattr(full_state, "consolidated", held)
    found: list[Any] = []
    saving = threading.Thread(target=lambda: found.append(optimizer.state_dict()["state"]))
    saving.start()
    assert reading.wait(PATIENCE_S)
    optimizer.zero_grad()
    _backward(params)

    def train() -> None:
        optimizer.step()
        order.append("stepped")

    training = threading.Thread(target=train)
    training.start()
    training.join(0.2)
    may_go_on.set()
    for thread in (saving, training):
        thread.join(PATIENCE_S)
    assert order == ["read", "stepped"]
    assert [float(state["momentum_buffer"][0]) for state in found[0].values()] == [2.0, 2.0]
    optimizer.close()


def _state_that_lacks_a_part_of_a_step_is_refused(rank: int, world_size: int) -> None:
    params, optimizer = _made(Failing)
    with torch.no_grad():
        params[1].add_(1)
    _backward(params)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    with pytest.raises(zero_opt.StepFailed, match="ZeroDivisionError"):
        optimizer.state_dict()
    optimizer.close()


@pytest.mark.parametrize(
    "case",
    [
        _a_step_that_is_being_taken_is_not_mixed_with_the_one_before,
        _a_step_waits_for_a_thread_that_reads_the_state,
        _state_that_lacks_a_part_of_a_step_is_refused,
    ],
    ids=lambda case: case.__name__.strip("_"),
)
def test_a_rank_alone(case: Callable[..., None]) -> None:
    run_processes(1, case, backend=None)
