"""Which edits of hyperparameters can be stepped with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from zero_opt import CPUAdamW
from zero_opt.errors import ConfigConflict, ConfigError, ConfigTypeError
from zero_opt.optimizer.hyperparameters import HyperForms

_FIRST: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": False, "foreach": None, "own": 3}


class Other(torch.optim.Optimizer):
    """A class that torch.optim does not have."""


def _check(edits: dict[str, Any], *, gone: str = "", cls: Any = torch.optim.AdamW, first: Any = None) -> None:
    forms, first = HyperForms(cls), {**_FIRST, **(first or {})}
    forms.learn([{"params": []}, {"params": [], **first}], {key: 0 for key in first if key != "own"})
    forms.check([{"params": []}, {"params": [], **{k: v for k, v in {**first, **edits}.items() if k != gone}}], {})


@pytest.mark.parametrize(
    ("edits", "kind", "words"),
    [
        ({"lr": "0.1"}, ConfigTypeError, "a number, got '0.1'"),
        ({"lr": None}, ConfigTypeError, "a number, got None"),
        ({"lr": [0.1]}, ConfigTypeError, "a number, got"),
        ({"lr": 1j}, ConfigTypeError, "a number, got 1j"),
        ({"lr": float("nan")}, ConfigError, "is NaN"),
        ({"lr": torch.tensor(float("nan"))}, ConfigError, "is NaN"),
        ({"lr": torch.ones(2)}, ConfigTypeError, r"a tensor, torch.float32 of shape \(2,\)"),
        ({"lr": torch.tensor(0.1, device="meta")}, ConfigTypeError, "meta device"),
        ({"betas": (0.9,)}, ConfigTypeError, "2 numbers"),
        ({"betas": 0.9}, ConfigTypeError, "2 numbers"),
        ({"betas": (0.9, "x")}, ConfigTypeError, "a number, got 'x'"),
        ({"betas": (0.9, 1.5)}, ConfigError, r"in \[0, 1\)"),
        ({"betas": np.array([0.9, 1.5])}, ConfigError, r"in \[0, 1\)"),
        ({"betas": np.array([0.9, 0.99, 0.5])}, ConfigTypeError, "2 numbers"),
        ({"betas": np.array([[0.9], [0.99]])}, ConfigTypeError, "a number, got"),
        ({"betas": np.ones(100)}, ConfigTypeError, "2 numbers"),
        ({"lr": np.ones(2)}, ConfigTypeError, "a number, got"),
        ({"amsgrad": "no"}, ConfigTypeError, "True or False"),
        ({"amsgrad": np.ones(2)}, ConfigTypeError, "True or False"),
        ({"amsgrad": torch.ones(2)}, ConfigTypeError, "True or False"),
        ({"foreach": np.ones(2)}, ConfigTypeError, "True or False"),
    ],
)
def test_an_edit_that_cannot_work_names_group_and_key(edits: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(kind, match=f"'{next(iter(edits))}' of param group 1 .*{words}"):
        _check(edits)


def test_a_key_that_is_gone_is_named() -> None:
    with pytest.raises(ConfigError, match="param group 1 has lost its 'lr'"):
        _check({}, gone="lr")
    _check({}, gone="own")


@pytest.mark.parametrize(
    "edits",
    [
        {"lr": 1},
        {"lr": -0.5},
        {"lr": float("inf")},
        {"lr": torch.tensor(0.5)},
        {"lr": torch.tensor([0.5])},
        {"betas": [0.5, torch.tensor(0.9)]},
        {"betas": np.array([0.5, 0.9])},
        {"amsgrad": 1},
        {"amsgrad": []},
        {"foreach": True},
        {"own": "anything"},
    ],
)
def test_what_the_class_can_compute_with_passes(edits: dict[str, Any]) -> None:
    _check(edits)


def test_another_class_may_mean_something_by_none_and_by_betas() -> None:
    _check({"lr": None, "betas": (0.9, 1.5)}, cls=Other)
    _check({"lr": "x"}, cls=Other, first={"lr": None})
    _check({"lr": np.ones(2), "foreach": np.ones(2)}, cls=Other, first={"lr": np.zeros(3)})


def test_a_tensor_that_is_written_in_place_is_looked_at_again() -> None:
    lr = torch.tensor(0.1)
    forms, groups = HyperForms(torch.optim.AdamW), [{"params": [], "lr": lr}]
    forms.learn(groups, {"lr": 0})
    forms.check(groups, {})
    lr.fill_(float("nan"))
    with pytest.raises(ConfigError, match="'lr' of param group 0 is NaN"):
        forms.check(groups, {})


def test_an_array_that_is_written_in_place_is_looked_at_again() -> None:
    betas = np.array([0.9, 0.99])
    forms, groups = HyperForms(torch.optim.AdamW), [{"params": [], "betas": betas}]
    forms.learn(groups, {"betas": 0})
    forms.check(groups, {})
    betas[0] = 1.5
    with pytest.raises(ConfigError, match="'betas' of param group 0 must be in"):
        forms.check(groups, {})


@pytest.mark.parametrize(
    ("cls", "edits", "missing"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (CPUAdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum_buffer"),
        (torch.optim.RMSprop, {"centered": True}, "grad_avg"),
        (torch.optim.SGD, {"momentum": 0.9}, ""),
        (torch.optim.AdamW, {"maximize": True, "foreach": True}, ""),
        (Other, {"amsgrad": True}, ""),
    ],
)
def test_an_option_that_needs_state_comes_too_late(cls: Any, edits: dict[str, Any], missing: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.zeros(3)
    plain = (torch.optim.AdamW if cls is Other else cls)([param], lr=0.1)
    forms = HyperForms(cls)
    forms.learn(plain.param_groups, plain.defaults)
    plain.step()
    first, groups = [dict(group) for group in plain.param_groups], [{**group, **edits} for group in plain.param_groups]
    forms.check(groups, {})  # before the first step
    forms.check(first, plain.state)
    if not missing:
        forms.check(groups, plain.state)
        return
    for _ in range(2):
        with pytest.raises(ConfigConflict, match=f"param group 0: {next(iter(edits))} cannot .* no '{missing}'"):
            forms.check(groups, plain.state)
    plain.state[param][missing] = torch.zeros(3)
    forms.check(groups, plain.state)


def test_complex_parameters_are_not_stepped_with_fused_whatever_group_they_are_in() -> None:
    real, imaginary = torch.zeros(3), torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    groups = [{"params": [real, real], "fused": True}, {"params": [imaginary], "fused": None}]
    for cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        forms = HyperForms(cls)
        forms.learn(groups, {"fused": None})
        forms.check(groups, {})
        edited = [groups[0], {**groups[1], "fused": True}]
        for _ in range(2):
            with pytest.raises(ConfigConflict, match=r"parameter 2 \(group 1, .*complex64.*fused=False"):
                forms.check(edited, {})


def test_an_option_that_was_off_in_the_meantime_is_looked_at_again() -> None:
    forms, param = HyperForms(torch.optim.AdamW), torch.nn.Parameter(torch.ones(2))
    group: dict[str, Any] = {**torch.optim.AdamW([param]).param_groups[0], "amsgrad": True, "maximize": True}
    state = {param: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    forms.learn([group], torch.optim.AdamW([param]).defaults)
    for option in ("amsgrad", "maximize"):
        group[option] = False
    forms.check([group], state)
    for option in ("amsgrad", "maximize"):
        group[option] = True
    with pytest.raises(ConfigConflict, match="param group 0: amsgrad cannot be switched on"):
        forms.check([group], state)
    state[param]["max_exp_avg_sq"] = torch.ones(2)
    forms.check([group], state)
