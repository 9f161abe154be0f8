"""load_state_dict(strict=False): what does not fit starts afresh, and the log says so."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_threads
from test.support.scenario import values

SHAPES = ((40, 6), (40,), (3, 40))


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(values(3, 0, 0, i, shape).clone()) for i, shape in enumerate(SHAPES)]


def _fill(params: list[nn.Parameter]) -> None:
    for index, param in enumerate(params):
        param.grad = values(4, 0, 0, index, tuple(param.shape)).clone()


def _saved() -> dict[str, Any]:
    params = _params()
    plain = torch.optim.Adam(params, lr=0.5)
    _fill(params)
    plain.step()
    return plain.state_dict()


def _spoiled() -> dict[str, Any]:
    """Parameter 1 does not fit, there is state of one that is not there, and ``betas`` are missing."""
    saved = copy.deepcopy(_saved())
    saved["state"][1]["exp_avg"] = torch.zeros(7)
    saved["state"][8] = saved["state"][0]
    del saved["param_groups"][0]["betas"]
    return saved


def _expected() -> dict[str, Any]:
    params = _params()
    plain = torch.optim.Adam(params, lr=0.5, betas=(0.5, 0.6))
    saved = _saved()
    del saved["state"][1]
    saved["param_groups"][0]["betas"] = (0.5, 0.6)
    plain.load_state_dict(saved)
    _fill(params)
    plain.step()
    return {"params": [param.detach() for param in params], "state": plain.state_dict()}


def _load(rank: int, world_size: int) -> dict[str, Any]:
    params = _params()
    opt = zero_opt.ShardedOptimizer(params, torch.optim.Adam, lr=0.1, betas=(0.5, 0.6), reduction=zero_opt.AtStep())
    spoiled = _spoiled()
    with pytest.raises(zero_opt.StateDictError):
        opt.load_state_dict(spoiled)
    assert opt.param_groups[0]["lr"] == 0.1
    opt.load_state_dict(spoiled, strict=False)
    assert_bitwise(spoiled, _spoiled())
    _fill(params)
    opt.step()
    opt.consolidate_state_dict()
    found = {"params": [param.detach() for param in params], "state": opt.state_dict() if rank == 0 else None}
    opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_fits_is_loaded_and_the_rest_starts_afresh(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zero_opt")
    expected = _expected()
    for rank, found in enumerate(run_threads(world_size, _load)):
        assert_bitwise(found["params"], expected["params"])
        if rank == 0:
            assert_bitwise(found["state"], expected["state"])
    left_out, fresh = [record.getMessage() for record in caplog.records]
    assert "parameter 1 has shape (7,)" in left_out and "parameter 8, which is in no param group" in left_out
    assert "no state for 1 of 3 parameters, the first of them parameter 1 (group 0, position 1)" in fresh


def test_groups_that_are_others_stay_an_error() -> None:
    opt = zero_opt.ShardedOptimizer(_params(), torch.optim.Adam)
    saved = _saved()
    saved["param_groups"].append(saved["param_groups"][0])
    with pytest.raises(zero_opt.StateDictError, match="2 param groups, the optimizer 1"):
        opt.load_state_dict(saved, strict=False)


def _strict_of_one(rank: int, world_size: int) -> str:
    opt = zero_opt.ShardedOptimizer(_params(), torch.optim.Adam, reduction=zero_opt.AtStep())
    with pytest.raises(zero_opt.ConfigTypeError) as caught:
        opt.load_state_dict(_saved(), strict=rank if rank else False)  # type: ignore[arg-type]
    opt.close()
    return str(caught.value)


def test_strict_is_true_or_false_on_every_rank() -> None:
    for message in run_threads(2, _strict_of_one):
        assert "strict must be True or False, got 1" in message
