"""States of many parameters that need no look at each, and what does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_opt.state.usual_states import are_usual, columns_of_alike

PARAMS = [torch.zeros(2, 3), torch.zeros(5)]


def _states() -> list[dict[str, Any]]:
    return [{"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(param)} for param in PARAMS]


def test_those_of_adam_are() -> None:
    assert are_usual(_states(), PARAMS)
    assert not are_usual([], [])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(step=torch.tensor(-1.0)),
        lambda state: state.update(step=torch.tensor(float("nan"))),
        lambda state: state.update(step=torch.tensor(3)),
        lambda state: state.update(step=3),
        lambda state: state.update(exp_avg=torch.zeros(6)),
        lambda state: state.update(exp_avg=torch.zeros(2, 3, dtype=torch.bfloat16)),
        lambda state: state.update(exp_avg=torch.zeros(3, 2).t()),
        lambda state: state.update(exp_avg=torch._neg_view(torch.zeros(2, 3))),
        lambda state: state.update(exp_avg=torch.zeros(2, 3, device="meta")),
        lambda state: state.update(exp_avg=torch.zeros(2, 3).to_sparse()),
        lambda state: state.update(exp_avg=torch.nested.nested_tensor([torch.zeros(3), torch.zeros(3)])),
        lambda state: state.update(exp_avg=torch.zeros(2, 3, dtype=torch.int64)),
        lambda state: state.update(exp_avg=torch.nn.Parameter(torch.zeros(2, 3))),
        lambda state: state["exp_avg"].untyped_storage().resize_(4),
        lambda state: state.update(more=torch.zeros(2, 3)),
        lambda state: state.update(master=torch.zeros(2, 3)),
        lambda state: state.pop("step"),
    ],
)
def test_what_is_looked_at_by_itself(change: Callable[[dict[str, Any]], Any]) -> None:
    states = _states()
    change(states[0])
    assert not are_usual(states, PARAMS)


@given(st.lists(st.lists(st.sampled_from([*"abc", 0]), unique=True), max_size=4))
def test_columns_are_of_states_with_the_same_names_in_one_order(keys: list[list[Any]]) -> None:
    states = [{key: torch.zeros(()) for key in names} for names in keys]
    columns = columns_of_alike(states)
    alike = bool(keys) and all(names == keys[0] for names in keys) and 0 not in keys[0]
    assert (columns is not None) == alike
    if columns is not None:
        assert [*columns] == keys[0]
        assert all(columns[key][at] is state[key] for at, state in enumerate(states) for key in state)
