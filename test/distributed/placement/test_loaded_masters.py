"""Masters out of a checkpoint: which of them and the parameter counts, in whatever order both are loaded."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.half_params import backward, make_params
from test.support.harness import assert_bitwise

LOADED: dict[str, dict[str, Any]] = {
    "device": {"fused": True, "precision": zero_opt.MixedPrecision(master_dtype=torch.float32)},
    "split": {"fused": True, "precision": zero_opt.MixedPrecision(master_dtype="split")},
    "host": {"fused": True, "offload": zero_opt.CPUOffload()},
    "worker": {"fused": True, "offload": zero_opt.WorkerOffload(threads=1)},
    "drafts": {"fused": True, "offload": zero_opt.WorkerOffload(threads=1, speculate=True)},
    "file": {"fused": True, "offload": zero_opt.NVMeOffload(tempfile.gettempdir(), threads=1)},
    "columns": {"fused": True, "offload": zero_opt.CPUOffload(selective=zero_opt.Selective(update_interval=1))},
}


def _go_on(params: Any, optimizer: zero_opt.ShardedOptimizer, steps: range) -> None:
    for step in steps:
        backward(params, step, 0)
        optimizer.step()
        optimizer.zero_grad()


def _trained(where: str) -> Any:
    params = make_params(torch.optim.AdamW, torch.bfloat16)
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, lr=0.02, **LOADED[where])
    _go_on(params, optimizer, range(2))
    return params, optimizer


@pytest.mark.parametrize("where", LOADED)
def test_weights_count_more_than_masters_of_others(where: str) -> None:
    """Of weights that others have trained on, whose checkpoint has carried the masters along."""
    params, optimizer = _trained(where)
    weights = [nn.Parameter(param.detach() * 2 + 1) for param in params]
    expected = [param.detach().float() for param in weights]
    other = zero_opt.ShardedOptimizer(weights, torch.optim.AdamW, lr=0.02, **LOADED[where])
    other.load_state_dict(optimizer.state_dict())
    for group in other.param_groups:
        group["lr"] = 1e-6
    _go_on(weights, other, range(2, 3))
    for param, weight in zip(weights, expected, strict=True):  # but for a rounding
        assert bool(((param.detach().float() - weight).abs() <= weight.abs() / 128 + 1e-5).all())
    other.close()
    optimizer.close()


@pytest.mark.parametrize("where", LOADED)
def test_the_model_may_be_loaded_after_the_optimizer(where: str) -> None:
    params, optimizer = _trained(where)
    resumed = make_params(torch.optim.AdamW, torch.bfloat16)
    other = zero_opt.ShardedOptimizer(resumed, torch.optim.AdamW, lr=0.02, **LOADED[where])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for param, weight in zip(resumed, params, strict=True):
            param.copy_(weight)
    _go_on(resumed, other, range(2, 5))
    _go_on(params, optimizer, range(2, 5))
    assert_bitwise([param.detach() for param in resumed], [param.detach() for param in params])
    assert_bitwise(other.state_dict()["state"], optimizer.state_dict()["state"])
    other.close()
    optimizer.close()
