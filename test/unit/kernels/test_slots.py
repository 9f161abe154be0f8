"""Runs that are kept from step to step, and what makes them be made anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from zero_opt import CPUSGD, CPUAdamW, CPULion
from zero_opt.errors import StateDictError
from zero_opt.kernels import native_optimizer
from zero_opt.kernels.adam_state import MOMENTS
from zero_opt.kernels.functions import ADAM
from zero_opt.kernels.slots import Slot, SlotBatch


def batch_of(params: list[Tensor], states: list[dict[str, Any]]) -> SlotBatch:
    made = [
        Slot("w", state, param, param, update=ADAM, roles=MOMENTS) for param, state in zip(params, states, strict=True)
    ]
    return SlotBatch(made, params, states)


def state_of(param: Tensor) -> dict[str, Any]:
    return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}


@pytest.mark.parametrize(
    "change",
    [
        lambda param, state: setattr(param, "data", param.data.clone()),
        lambda param, state: state.update(exp_avg=state["exp_avg"].clone()),
        lambda param, state: setattr(state["exp_avg_sq"], "data", state["exp_avg_sq"].clone()),
        lambda param, state: setattr(state["exp_avg"], "data", state["exp_avg"].t()),
        lambda param, state: state.pop("step"),
    ],
)
def test_what_was_replaced_or_repointed_is_noticed(change: Callable[[Tensor, dict[str, Any]], Any]) -> None:
    params = [torch.zeros(2, 3), torch.zeros(5)]
    states = [state_of(param) for param in params]
    batch = batch_of(params, states)
    params[0].add_(1)
    assert batch.holds(params, states, roles=[MOMENTS, MOMENTS])
    change(params[0], states[0])
    assert not batch.holds(params, states, roles=[MOMENTS, MOMENTS])


def test_gradients_of_another_kind_are_not_taken() -> None:
    params = [torch.zeros(2, 3), torch.zeros(5)]
    batch = batch_of(params, [state_of(param) for param in params])
    last = torch.ones(5)
    assert batch.takes([torch.ones(2, 3), last])
    for odd in (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(6)):
        assert not batch.takes([odd, last])


def test_a_moment_with_fewer_elements_in_its_place_is_refused() -> None:
    param = Parameter(torch.ones(64))
    optimizer = CPUAdamW([param])
    param.grad = torch.ones(64)
    optimizer.step()
    before = param.detach().clone()
    optimizer.state[param]["exp_avg"].resize_(3)
    with pytest.raises(StateDictError, match="exp_avg of CPUAdamW param 0"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("make", [CPUSGD, lambda params: CPUSGD(params, momentum=0.9), CPULion, CPUAdamW])
def test_a_run_is_kept_once_state_has_its_first_values(
    make: Callable[[list[Parameter]], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    param = Parameter(torch.ones(64))
    optimizer = make([param])
    param.grad = torch.ones(64)
    optimizer.step()
    optimizer.step()
    monkeypatch.setattr(native_optimizer, "Slot", None)
    optimizer.step()
