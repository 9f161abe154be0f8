"""What ranks compare."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from zero_opt.optimizer.contents import HyperDigest, contents, loaded_digest
from zero_opt.state.usual_states import UsualStates


def describe(index: int) -> str:
    return f"parameter {index}"


def listed(param: Tensor, values: bool = True, **group: Any) -> dict[str, Any]:
    return dict(contents([{"params": [param], "lr": 1.0, **group}], 0, describe, values=values))


def test_contents_can_be_sent() -> None:
    entries = listed(Parameter(torch.ones(2, 3, dtype=torch.bfloat16)), param_names=["w"])
    assert json.loads(json.dumps(entries)) == entries


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (lambda: torch.ones(3, 2), "shape"),
        (lambda: torch.ones(3, 2).t(), "strides"),
        (lambda: torch.ones(2, 3, dtype=torch.float64), "dtype"),
        (lambda: torch.ones(2, 3, requires_grad=True), "requires_grad"),
        (lambda: torch.full((2, 3), 2.0), "values"),
    ],
)
def test_every_difference_shows(changed: Any, name: str) -> None:
    before, after = listed(torch.ones(2, 3)), listed(changed())
    assert before.keys() == after.keys()
    assert before[f"parameter 0 {name}"] != after[f"parameter 0 {name}"]


def test_names_come_before_labels_that_have_them() -> None:
    """Else a name that one rank lacks would be taken for a difference in the shape."""
    named, other, without = (
        listed(torch.ones(1), **names) for names in ({"param_names": ["a"]}, {"param_names": ["b"]}, {})
    )
    assert named["name of parameter 0"] == "a" != other["name of parameter 0"]
    key = "names of parameters in group 0"
    assert named[key] == other[key] != without[key]
    assert [*named].index(key) < [*named].index("name of parameter 0") < [*named].index("parameter 0 shape")


def test_hyperparameters_are_compared_by_name_and_value() -> None:
    """A slice is stepped by one rank, with what that rank has."""
    assert listed(torch.ones(1), lr=2.0) != listed(torch.ones(1))
    assert listed(torch.ones(1), momentum=0.9) != listed(torch.ones(1))


def test_values_are_read_only_when_asked_for() -> None:
    assert not [name for name in listed(torch.ones(1), values=False) if name.endswith("values")]


def test_gaps_need_not_be_the_same() -> None:
    """A parameter with gaps is copied into storage order of its own, so its strides do not matter."""
    one, other = torch.ones(4, 6)[:, ::2], torch.ones(4, 9)[:, ::3]
    assert listed(one) == listed(other)


def test_an_added_group_is_listed_with_global_indices() -> None:
    groups = [{"params": [torch.ones(1), torch.ones(2)]}, {"params": [torch.ones(3)]}]
    names = [name for name, _ in contents(groups, 1, describe, values=False)]
    assert "number of parameters in group 1" in names
    assert "parameter 2 shape" in names
    assert not any("group 0" in name or "parameter 0" in name for name in names)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 1 / 10),
        (torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)),
        ((0.9, torch.tensor(0.5)), (0.9, torch.tensor(0.5))),
        (float("nan"), float("nan")),
        (torch.tensor([0.5]), np.float32(0.5)),
        (object(), object()),
        ([torch.ones(2)], [torch.zeros(2)]),
    ],
)
def test_values_that_say_the_same_or_nothing_count_as_equal(one: object, other: object) -> None:
    found = [list(contents([{"params": [], "key": value}], 0, str, values=False)) for value in (one, other)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.2),
        (1, True),
        (None, False),
        ((0.9, 0.99), (0.9, 0.999)),
        (torch.tensor(0.5), torch.tensor(0.25)),
        (torch.tensor([0.5]), torch.tensor([0.25])),
        (np.float32(0.5), np.float32(0.25)),
        (np.int64(1), np.int64(2)),
        ([np.float32(0.5)], [np.float32(0.25)]),
    ],
)
def test_values_that_differ(one: object, other: object) -> None:
    found = [dict(contents([{"params": [], "key": value}], 0, str, values=False)) for value in (one, other)]
    assert found[0] != found[1]
    assert json.loads(json.dumps(found[0])) == found[0]


@pytest.mark.parametrize("of", [float, np.float32, np.float64, torch.tensor, lambda lr: torch.tensor([lr])])
def test_a_digest_tells_numbers_of_every_kind_apart(of: Any) -> None:
    digest = HyperDigest()
    assert digest.of([{"lr": of(0.5)}], []) == HyperDigest().of([{"lr": 0.5}], []) != digest.of([{"lr": of(0.25)}], [])


def test_a_digest_of_edits_tells_whose_hyperparameters_are_whose() -> None:
    mine, swapped = [{"lr": 0.1}, {"lr": 0.2}], [{"lr": 0.2}, {"lr": 0.1}]
    assert HyperDigest().of(mine, []) == HyperDigest().of([dict(group) for group in mine], [])
    assert HyperDigest().of(mine, []) != HyperDigest().of(swapped, [])
    assert HyperDigest().of(mine, [1]) != HyperDigest().of(mine, [])


def state(step: float = 1.0) -> dict[Any, Any]:
    return {"step": torch.tensor(step), "exp_avg": torch.arange(6.0).view(2, 3), 1: 2.0, "large": torch.zeros(1 << 13)}


def digest(*states: dict[Any, Any], lr: float = 0.1) -> bytes:
    return loaded_digest(dict(enumerate(states)), [{"params": [], "lr": lr}])


def test_equal_states_have_the_same_digest() -> None:
    assert digest(state(), state()) == digest(state(), state())


@pytest.mark.parametrize(
    "states",
    [
        (state(), state(2.0)),
        (state(),),
        (state(), {**state(), "exp_avg": torch.arange(6.0).view(3, 2)}),
        (state(), {**state(), "exp_avg": torch.arange(6).view(2, 3)}),
        (state(), {**state(), "exp_avg": torch.tensor([[0.0, 1.0, 2.0], [4.0, 3.0, 5.0]])}),
        (state(), {**state(), "large": torch.arange(1 << 13) * 1.0}),
        (state(), {**state(), 1: 3.0}),
        *((state(), {(key if old == 1 else old): value for old, value in state().items()}) for key in ("1", True, 1.0)),
    ],
)
def test_states_that_differ_have_another_digest(states: Any) -> None:
    assert digest(*states) != digest(state(), state())


def adam_state(step: float = 1.0) -> dict[str, Any]:
    return {"step": torch.tensor(step), "exp_avg": torch.arange(6.0).view(2, 3), "large": torch.zeros(1 << 13)}


def usual_digest(*states: dict[str, Any]) -> bytes:
    return loaded_digest(UsualStates(enumerate(states)), [])


def test_equal_usual_states_have_the_same_digest() -> None:
    assert usual_digest(adam_state(), adam_state()) == usual_digest(adam_state(), adam_state())


@pytest.mark.parametrize(
    "states",
    [
        [adam_state()],
        [adam_state(), adam_state(2.0)],
        [{**adam_state(), "exp_avg": torch.tensor([[0.0, 1.0, 2.0], [4.0, 3.0, 5.0]])} for _ in range(2)],
        [{**adam_state(), "exp_avg": torch.arange(6.0).to(torch.bfloat16).view(2, 3)} for _ in range(2)],
        [{**adam_state(), "large": torch.arange(1 << 13) * 1.0} for _ in range(2)],
        [{("other" if key == "exp_avg" else key): value for key, value in adam_state().items()} for _ in range(2)],
    ],
)
def test_usual_states_that_differ_have_another_digest(states: list[dict[str, Any]]) -> None:
    assert usual_digest(*states) != usual_digest(adam_state(), adam_state())


def test_hyperparameters_are_in_the_digest_of_loaded_state() -> None:
    assert digest(state(), lr=0.1) != digest(state(), lr=0.2)
