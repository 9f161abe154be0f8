"""Entries and values of ``opt.state`` that the user has given to another parameter, and those of 0-dim parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise
from test.support.offloads import FORMS, OFFLOADS


def _exchange(state: Any, first: Tensor, second: Tensor) -> None:
    state[first], state[second] = state[second], state[first]


def _exchange_copies(state: Any, first: Tensor, second: Tensor) -> None:
    state[first], state[second] = dict(state[second]), dict(state[first])


def _exchange_values(state: Any, first: Tensor, second: Tensor) -> None:
    for key in state[first].keys() - {"step", "master"}:
        state[first][key], state[second][key] = state[second][key], state[first][key]


def _move(state: Any, first: Tensor, second: Tensor) -> None:
    state[first] = state.pop(second)


EDITS = [_exchange, _exchange_copies, _exchange_values, _move]


def _train(optimizer: Any, params: list[nn.Parameter], edit: Callable[[Any, Tensor, Tensor], None]) -> None:
    for step in range(4):
        for number, param in enumerate(params):
            param.grad = torch.linspace(-1.0, 1.0 + number + step, param.numel()).view(param.shape)
        optimizer.step()
        if isinstance(optimizer, zero_opt.ShardedOptimizer):
            optimizer.flush()
        if step == 1:
            edit(optimizer.state, params[0], params[1])


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", OFFLOADS)
def test_a_parameter_goes_on_with_the_state_of_another(
    placement: str, form: str, edit: Callable[[Any, Tensor, Tensor], None], tmp_path: Path
) -> None:
    given = {"lr": 1e-2, "state": FORMS[form]}
    plain, params = ([nn.Parameter(torch.ones(200)) for _ in range(3)] for _ in range(2))
    reference = zero_opt.CPUAdamW(plain, **given)
    _train(reference, plain, edit)
    offload = OFFLOADS[placement](str(tmp_path))
    with closing(zero_opt.ShardedOptimizer(params, zero_opt.CPUAdamW, offload=offload, **given)) as optimizer:
        _train(optimizer, params, edit)
        assert_bitwise([param.detach() for param in params], [param.detach() for param in plain])


@pytest.mark.parametrize("form", ["bfloat16", "block8"])
@pytest.mark.parametrize("placement", OFFLOADS)
def test_compact_state_of_a_parameter_without_dimensions_can_be_edited(
    placement: str, form: str, tmp_path: Path
) -> None:
    state = zero_opt.AdamState(form, "float32")
    param = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))
    offload = OFFLOADS[placement](str(tmp_path))
    with closing(
        zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=1e-2, state=state, offload=offload)
    ) as optimizer:
        for _ in range(2):
            param.grad = torch.tensor(0.5, dtype=torch.bfloat16)
            optimizer.step()
            optimizer.flush()
            optimizer.state[param]["exp_avg"].fill_(0.25)
        shown = optimizer.state_dict()["state"][0]
        assert shown["exp_avg"].item() == 0.25 and shown["step"].item() == 2
