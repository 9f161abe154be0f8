"""What was read, written to or replaced in ``opt.state`` before a load is gone after it, under every placement."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.harness import assert_bitwise
from test.support.offloads import FORMS, OFFLOADS

NUMEL = 200
Entry = Any
EDITS: dict[str, Callable[[Entry], object]] = {
    "read": lambda entry: dict(entry),
    "step": lambda entry: entry.update(step=torch.tensor(70.0)),
    "exp_avg": lambda entry: entry["exp_avg"].fill_(64.0),
    "exp_avg replaced": lambda entry: entry.update(exp_avg=torch.full_like(entry["exp_avg"], 64.0)),
}


def _step(param: nn.Parameter, optimizer: zero_opt.ShardedOptimizer, grad: float) -> None:
    param.grad = torch.full((NUMEL,), grad)
    optimizer.step()
    optimizer.flush()


def _after_a_load(offload: Any, form: zero_opt.AdamState, edit: Callable[[Entry], object] | None) -> tuple[Tensor, Any]:
    param = nn.Parameter(torch.ones(NUMEL))
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, lr=1e-2, state=form, offload=offload)
    _step(param, optimizer, 1.0)
    saved = copy.deepcopy(optimizer.state_dict())
    _step(param, optimizer, 2.0)
    if edit is not None:
        edit(optimizer.state[param])
    optimizer.load_state_dict(saved)
    shown = {key: value.clone() for key, value in optimizer.state[param].items()}
    assert_bitwise(optimizer.state_dict()["state"][0], shown)
    if edit is not None:
        optimizer.state[param]["exp_avg_sq"].mul_(1.0)  # so that all that is kept of the entry is taken over
    _step(param, optimizer, 1.0)
    after = {key: value.clone() for key, value in optimizer.state[param].items()}
    optimizer.close()
    return param.detach(), [shown, after]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", OFFLOADS)
def test_a_load_replaces_all(placement: str, form: str, edit: str, tmp_path: Path) -> None:
    without, edited = (
        _after_a_load(OFFLOADS[placement](str(tmp_path)), FORMS[form], how) for how in (None, EDITS[edit])
    )
    assert_bitwise(edited, without)


@pytest.mark.parametrize("placement", OFFLOADS)
def test_compact_values_that_are_read_in_inference_mode_can_be_edited(placement: str, tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(NUMEL))
    optimizer = zero_opt.ShardedOptimizer(
        [param], zero_opt.CPUAdamW, state=FORMS["bfloat16"], offload=OFFLOADS[placement](str(tmp_path))
    )
    _step(param, optimizer, 1.0)
    with torch.inference_mode():
        optimizer.state[param]["exp_avg"].fill_(0.5)
    assert bool((optimizer.state_dict()["state"][0]["exp_avg"] == 0.5).all())
    optimizer.state[param]["exp_avg"].mul_(2.0)
    assert bool((optimizer.state_dict()["state"][0]["exp_avg"] == 1.0).all())
    optimizer.close()


@pytest.mark.parametrize("placement", OFFLOADS)
def test_a_cleared_compact_entry_is_no_state(placement: str, tmp_path: Path) -> None:
    params = [nn.Parameter(torch.ones(NUMEL, dtype=torch.bfloat16)) for _ in range(2)]
    state = zero_opt.AdamState("bfloat16", "float32")
    optimizer = zero_opt.ShardedOptimizer(
        params, zero_opt.CPUAdamW, state=state, offload=OFFLOADS[placement](str(tmp_path))
    )
    for used in (params, params[:1]):
        for param in params:
            param.grad = torch.ones_like(param) if any(param is one for one in used) else None
        optimizer.step()
        optimizer.flush()
        optimizer.state[params[1]].clear()
    optimizer.state_dict()
    assert not optimizer.state_dict()["state"].get(1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()
