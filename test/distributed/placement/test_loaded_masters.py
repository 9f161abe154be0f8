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


SPLIT: dict[str, dict[str, Any]] = {
    "device": {"precision": zero_opt.MixedPrecision(master_dtype="split")},
    "alone": {"state": zero_opt.AdamState(master="split")},
    "host": {"state": zero_opt.AdamState(master="split"), "offload": zero_opt.CPUOffload()},
    "worker": {"state": zero_opt.AdamState(master="split"), "offload": zero_opt.WorkerOffload(threads=1)},
    "drafts": {"state": zero_opt.AdamState("block8", "split"), "offload": zero_opt.WorkerOffload(speculate=True)},
    "file": {"state": zero_opt.AdamState(master="split"), "offload": zero_opt.NVMeOffload(tempfile.gettempdir())},
}
# Halfway between two bf16 numbers: the smaller even, the larger even. The rest is not.
HALFWAY = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2**-134, 1.001, 2.0, -0.7]).repeat(3)


@pytest.mark.parametrize("found", [5.0, 1.0, 1.0078125, 0.0])
@pytest.mark.parametrize("away", [False, True], ids=["to even", "away from 0"])
@pytest.mark.parametrize("where", SPLIT)
def test_split_masters_halfway_between_two_numbers_follow_a_model_loaded_later(
    where: str, away: bool, found: float
) -> None:
    """Of a checkpoint of fp32 masters, which are rounded to even, and of split ones, rounded away from 0."""
    bits = HALFWAY.view(torch.int32)
    weights = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16) if away else HALFWAY.bfloat16()
    cls = torch.optim.AdamW if where == "device" else zero_opt.CPUAdamW
    param = nn.Parameter(torch.full_like(weights, found))
    other = zero_opt.ShardedOptimizer([param], cls, lr=0.0, weight_decay=0.0, fused=True, **SPLIT[where])
    saved = {"step": torch.tensor(3.0), "master": HALFWAY.clone()}
    saved |= {key: torch.ones_like(HALFWAY) for key in ("exp_avg", "exp_avg_sq")}
    other.load_state_dict({**other.state_dict(), "state": {0: saved}})
    with torch.no_grad():
        param.copy_(weights)
    # A pair cannot say halfway above an even number: one unit less.
    lacking = (weights.view(torch.int16).int() << 16) + 0x8000 == bits
    assert bool(lacking.any()) is not away
    expected = (bits - lacking.int()).view(torch.float32)
    assert_bitwise(other.state_dict()["state"][0]["master"], expected)
    for _ in range(2):
        param.grad = torch.zeros_like(param)
        other.step()
        other.flush()
        assert_bitwise(other.state_dict()["state"][0]["master"], expected)
    other.close()
