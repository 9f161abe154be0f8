"""Matching a loaded state dict with the optimizer's parameters, and cutting it to a slice."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from zero_opt import CPUAdam, CPUAdamW, ShardedOptimizer
from zero_opt.errors import StateDictError
from zero_opt.layout import ParamSlice, Span
from zero_opt.sharding.flat_param import FlatParam
from zero_opt.state.state_dict import Refused, copied, cut, fitted, match, pack_groups, torch_dtype

STRICT = Refused(strict=True)
CLASSES = [
    *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
    *(torch.optim.AdamW, torch.optim.ASGD, torch.optim.Muon, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD, CPUAdam, CPUAdamW),
]


def stepped_adamw() -> torch.optim.AdamW:
    """Two groups, three parameters, state for all."""
    params = [Parameter(torch.randn(2, 3)), Parameter(torch.randn(4)), Parameter(torch.randn(()))]
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def refuse(state_dict: Any, message: str, elementwise: bool = True) -> None:
    groups = stepped_adamw().param_groups
    with pytest.raises(StateDictError, match=message):
        match(state_dict, groups, elementwise, STRICT, whole=False)


def test_packed_groups_are_torchs() -> None:
    optimizer = stepped_adamw()
    assert pack_groups(optimizer.param_groups) == optimizer.state_dict()["param_groups"]


def test_numbers_are_saved_as_pythons_own() -> None:
    [packed] = pack_groups([{"params": [], "lr": Fraction(1, 4), "betas": (numpy.float64(0.5), 0.75), "fused": True}])
    assert packed == {"params": [], "lr": 0.25, "betas": (0.5, 0.75), "fused": True}
    assert [type(number) for number in (packed["lr"], *packed["betas"])] == [float] * 3


def test_a_state_dict_of_torchs_matches_by_position() -> None:
    optimizer = stepped_adamw()
    saved = optimizer.state_dict()
    matched = match(saved, optimizer.param_groups, elementwise=True, refused=STRICT, whole=False)
    assert list(matched) == [0, 1, 2]
    assert all(matched[i] is saved["state"][i] for i in range(3))


def test_saved_ids_need_not_be_numbers_in_order() -> None:
    saved = stepped_adamw().state_dict()
    names = {0: "w", 1: "b", 2: 99}
    renamed = {
        "state": {names[i]: state for i, state in reversed(saved["state"].items())},
        "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in saved["param_groups"]],
    }
    matched = match(renamed, stepped_adamw().param_groups, elementwise=True, refused=STRICT, whole=False)
    assert all(matched[i] is saved["state"][i] for i in range(3))


def test_state_may_be_missing_for_some_params() -> None:
    saved = stepped_adamw().state_dict()
    del saved["state"][1]
    assert sorted(match(saved, stepped_adamw().param_groups, elementwise=True, refused=STRICT, whole=False)) == [0, 2]


def test_matching_changes_nothing() -> None:
    saved = stepped_adamw().state_dict()
    before = copy.deepcopy(saved)
    match(saved, stepped_adamw().param_groups, elementwise=True, refused=STRICT, whole=False)
    assert repr(saved) == repr(before)


@pytest.mark.parametrize("bad", [None, 3, [1, 2], "checkpoint.pt"])
def test_not_a_dict(bad: object) -> None:
    refuse(bad, f"a state dict is a dict, got {type(bad).__name__}")


@pytest.mark.parametrize("key", ["state", "param_groups"])
def test_a_missing_part_is_named(key: str) -> None:
    saved = stepped_adamw().state_dict()
    del saved[key]
    refuse(saved, f"the state dict has no '{key}'")


@pytest.mark.parametrize("key", ["state", "param_groups"])
@pytest.mark.parametrize("bad", [None, 7, "x"])
def test_a_part_of_a_wrong_type_is_named(key: str, bad: object) -> None:
    refuse({**stepped_adamw().state_dict(), key: bad}, f"'{key}' of the state dict is a {type(bad).__name__}")


def test_the_number_of_groups() -> None:
    saved = stepped_adamw().state_dict()
    saved["param_groups"].pop()
    refuse(saved, "the state dict has 1 param groups, the optimizer 2")


def test_the_number_of_params_in_a_group() -> None:
    saved = stepped_adamw().state_dict()
    saved["param_groups"][0]["params"].pop()
    refuse(saved, "param group 0 has 1 parameters in the state dict and 2 in the optimizer")


@pytest.mark.parametrize("bad", [None, [0, 1], 3])
def test_a_group_that_is_no_dict(bad: object) -> None:
    saved = stepped_adamw().state_dict()
    saved["param_groups"][0] = bad
    refuse(saved, f"param group 0 of the state dict is a {type(bad).__name__}, not a dict")


def test_a_group_without_params() -> None:
    saved = stepped_adamw().state_dict()
    del saved["param_groups"][1]["params"]
    refuse(saved, "param group 1 of the state dict has no 'params'")


@pytest.mark.parametrize("bad", [None, 2, "01"])
def test_params_of_a_group_that_are_no_list(bad: object) -> None:
    saved = stepped_adamw().state_dict()
    saved["param_groups"][0]["params"] = bad
    refuse(saved, f"'params' of param group 0 of the state dict is a {type(bad).__name__}, not a list")


def test_a_param_that_is_listed_twice() -> None:
    """Numbering what follows would go wrong, and its state would end up with the wrong parameter."""
    saved = stepped_adamw().state_dict()
    saved["param_groups"][0]["params"] = [0, 0]
    refuse(saved, "the state dict lists parameter 0 twice")


def test_a_param_that_the_optimizer_has_twice_may_be_listed_twice() -> None:
    one, other = Parameter(torch.ones(2)), Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([one, one, other], lr=0.1, momentum=0.9)
    one.grad, other.grad = torch.ones(2), torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    matched = match(saved, optimizer.param_groups, elementwise=True, refused=STRICT, whole=False)
    assert matched[2] is saved["state"][2]


def test_a_param_that_no_id_can_stand_for() -> None:
    saved = stepped_adamw().state_dict()
    saved["param_groups"][1]["params"] = [{}]
    refuse(saved, "param group 1 of the state dict has {} for a parameter")


def test_state_of_no_param() -> None:
    saved = stepped_adamw().state_dict()
    saved["state"][17] = saved["state"][0]
    refuse(saved, "the state dict has state for parameter 17, which is in no param group")


def test_a_state_that_is_no_dict() -> None:
    saved = stepped_adamw().state_dict()
    saved["state"][1] = torch.zeros(4)
    refuse(saved, "the state of parameter 1 is a Tensor, not a dict")


@pytest.mark.parametrize("shape", [(3, 2), (2,), (2, 3, 1), (7,)])
def test_a_state_tensor_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    saved = stepped_adamw().state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(shape)
    refuse(saved, rf"state 'exp_avg' of parameter 0 has shape .*{shape[0]}.*, the parameter \(2, 3\)")


HUGE = pytest.param(10**5000, id="huge")
NO_COUNTS = [-1, -0.5, torch.nan, torch.inf, HUGE, torch.tensor(-1.0), torch.tensor([torch.inf])]


@pytest.mark.parametrize("step", NO_COUNTS)
def test_a_step_that_counts_nothing(step: Any) -> None:
    optimizer = ShardedOptimizer([Parameter(torch.ones(3))], torch.optim.Adam)
    state = {"step": step, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    saved = {**optimizer.state_dict(), "state": {0: state}}
    with pytest.raises(StateDictError, match=r"'step' of parameter 0 is .*, not a number of steps"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"] == {}


def test_classes_that_are_not_elementwise_have_state_of_any_shape() -> None:
    saved = stepped_adamw().state_dict()
    saved["state"][0] = {"row_var": torch.zeros(2, 1), "step": 3}
    assert match(saved, stepped_adamw().param_groups, elementwise=False, refused=STRICT, whole=False)[0]["step"] == 3


# -- what a step of the class needs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7, 1), (1, 7), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_what_a_class_saves_it_takes_back(cls: Any, shape: tuple[int, ...]) -> None:
    if (cls is torch.optim.Muon and len(shape) != 2) or (cls is torch.optim.Adafactor and 0 in shape):
        return  # such params they do not step
    optimizer = cls([Parameter(torch.ones(shape))], lr=0.1)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(shape)
    optimizer.step()
    saved = optimizer.state_dict()
    _, (hypers,) = fitted(saved["state"], optimizer.param_groups, saved["param_groups"], cls, STRICT, {})
    assert hypers == {k: v for k, v in saved["param_groups"][0].items() if k != "params"}


@pytest.mark.parametrize(
    ("key", "value"),
    [("row_var", torch.zeros(6, 4)), ("col_var", torch.zeros(4)), ("row_var", 3), ("step", torch.zeros(1))],
)
def test_state_of_classes_that_are_not_elementwise_is_checked_too(key: str, value: Any) -> None:
    optimizer = torch.optim.Adafactor([Parameter(torch.ones(6, 4))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(6, 4)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0][key] = value
    with pytest.raises(StateDictError, match=f"state '{key}' of parameter 0"):
        fitted(saved["state"], optimizer.param_groups, saved["param_groups"], torch.optim.Adafactor, STRICT, {})


def test_classes_of_others_are_not_tried_out() -> None:
    class Other(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            assert params[0].numel() == 3

    optimizer = Other([Parameter(torch.ones(3))])
    states = {0: {"x": 1}}
    saved_groups = [{"lr": "fast", "params": [0]}]
    assert fitted(states, optimizer.param_groups, saved_groups, Other, STRICT, {}) == (states, [{"lr": "fast"}])


def test_a_group_of_frozen_params_of_any_dtype() -> None:
    frozen = Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    optimizer = torch.optim.AdamW([{"params": [frozen]}, {"params": []}])
    fitted({}, optimizer.param_groups, optimizer.state_dict()["param_groups"], torch.optim.AdamW, STRICT, {})


def test_numbers_of_parameters_as_text_are_no_state_besides() -> None:
    optimizer = stepped_adamw()
    saved = optimizer.state_dict()
    text = {**saved, "state": {str(key): value for key, value in saved["state"].items()}}
    with pytest.raises(StateDictError, match="state for parameter '0', which is in no param group"):
        match(text, optimizer.param_groups, elementwise=True, refused=STRICT, whole=True)
    besides = {**saved, "state": {**saved["state"], "mine": {}, "99": {}}}
    assert sorted(match(besides, optimizer.param_groups, elementwise=True, refused=STRICT, whole=True)) == [
        *saved["state"]
    ]


def test_values_that_the_class_refuses_only_together_are_taken_if_a_step_does() -> None:
    optimizer = torch.optim.SGD([Parameter(torch.ones(3))], lr=0.1, momentum=0.9, nesterov=True)
    optimizer.param_groups[0]["momentum"] = 0.0
    saved = optimizer.state_dict()["param_groups"]
    fresh = torch.optim.SGD([Parameter(torch.ones(3))], lr=0.1, momentum=0.9, nesterov=True)
    _, groups = fitted({}, fresh.param_groups, saved, torch.optim.SGD, STRICT, {})
    assert groups[0]["momentum"] == 0.0 and groups[0]["nesterov"] is True
    for key, value in (("momentum", -0.5), ("lr", -1.0), ("lr", "fast")):
        with pytest.raises(StateDictError, match="SGD refuses param group 0"):
            fitted({}, fresh.param_groups, [{**saved[0], key: value}], torch.optim.SGD, STRICT, {})


def test_a_number_beside_a_tensor_in_one_tuple_is_taken_if_a_step_does() -> None:
    def made() -> torch.optim.Optimizer:
        betas = (torch.tensor(0.9), torch.tensor(0.99))
        return torch.optim.AdamW([Parameter(torch.ones(3))], lr=torch.tensor(0.01), betas=betas, foreach=False)

    optimizer = made()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    (saved,) = optimizer.state_dict()["param_groups"]
    assert [type(beta) for beta in saved["betas"]] == [float, torch.Tensor]
    _, (group,) = fitted({}, made().param_groups, [saved], torch.optim.AdamW, STRICT, {})
    assert group["betas"] == saved["betas"]
    for key, value in (
        ("betas", (-0.5, torch.tensor(0.99))),
        ("betas", (0.9, torch.tensor(1.5))),
        ("betas", (0.9, torch.tensor([0.9, 0.9]))),
        ("lr", -1.0),
        ("lr", torch.tensor(-1.0)),
        ("eps", -1.0),
    ):
        with pytest.raises(StateDictError, match="AdamW refuses param group 0"):
            fitted({}, made().param_groups, [{**saved, key: value}], torch.optim.AdamW, STRICT, {})


# -- cutting ----------------------------------------------------------------------------------------------------------


def piece_of(start: int, stop: int) -> ParamSlice:
    return ParamSlice(0, 0, Span(start, stop), Span(start, stop), Span(0, stop - start))


@given(st.permutations(range(3)), st.integers(0, 30), st.integers(0, 30))
def test_slices_are_cut_in_the_params_storage_order(order: list[int], one: int, other: int) -> None:
    start, stop = sorted((one, other))
    back = [order.index(d) for d in range(3)]
    param = Parameter(torch.zeros([[5, 3, 2][d] for d in order]).permute(back))
    flat = FlatParam(param, "p")
    full = torch.arange(30.0).view(5, 3, 2)  # saved contiguous, whatever the parameter's strides are
    part = cut({"exp_avg": full, "step": torch.tensor(4.0), "rate": 0.5}, piece_of(start, stop), flat)
    whole = (start, stop) == (0, 30)
    expected = full if whole else flat.flatten(full)[start:stop]
    assert torch.equal(part["exp_avg"], expected)
    assert part["step"] == 4
    assert part["rate"] == 0.5


@pytest.mark.parametrize("span", [(0, 6), (2, 5)])
def test_what_is_cut_shares_no_memory_with_what_is_loaded(span: tuple[int, int]) -> None:
    state = {"exp_avg": torch.zeros(2, 3), "step": torch.tensor(1.0), "row": torch.zeros(2)}
    before = copy.deepcopy(state)
    part = cut(state, piece_of(*span), FlatParam(Parameter(torch.zeros(2, 3)), "p"))
    for value in part.values():
        value.add_(1)
    assert all(torch.equal(state[key], before[key]) for key in state)


def test_cut_parts_put_together_are_the_whole() -> None:
    flat = FlatParam(Parameter(torch.zeros(4, 8).t()), "p")
    full = torch.randn(8, 4)
    parts = [cut({"m": full}, piece_of(start, start + 8), flat)["m"] for start in range(0, 32, 8)]
    assert torch.equal(flat.shaped(torch.cat(parts)), full)


ALIKE = {i: {"m": torch.ones(2, i, requires_grad=i > 3).t(), "step": torch.tensor(float(i))} for i in (5, 3)}
OTHERS = [
    {},
    {5: {"step": 5}},
    {1: {"m": Parameter(torch.ones(())), "step": torch.ones(())}},
    {4: {"n": torch.ones(2)}},
]


@pytest.mark.parametrize("others", OTHERS)
def test_copied_state_is_equal_and_separate(others: dict[int, dict[str, Any]]) -> None:
    state: dict[int, dict[str, Any]] = ALIKE | others
    again = copied(state)
    assert [(index, [*entry]) for index, entry in again.items()] == [(index, [*state[index]]) for index in state]
    for index, entry in again.items():
        for key, value in entry.items():
            original = state[index][key]
            if not isinstance(value, Tensor):
                assert value == original
                continue
            assert (value.dtype, value.shape, value.stride()) == (original.dtype, original.shape, original.stride())
            assert torch.equal(value, original)
            assert value.data_ptr() != original.data_ptr()
            assert not value.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_dtypes_by_name(dtype: torch.dtype) -> None:
    assert torch_dtype(str(dtype)) is dtype
    assert isinstance(torch.zeros(1, dtype=torch_dtype(str(dtype))), Tensor)
