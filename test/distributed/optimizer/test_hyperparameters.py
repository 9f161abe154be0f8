"""Hyperparameters that cannot work: the same typed error on every rank, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import run_processes


def _edited(rank: int, world_size: int, value: Any, edits: list[int], offload: Any) -> str:
    param = torch.nn.Parameter(torch.ones(200))
    optimizer = zero_opt.ShardedOptimizer([param], torch.optim.AdamW, lr=0.1, fused=True, offload=offload)
    param.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = param.detach().clone()
    param.sum().backward()
    if rank in edits:
        optimizer.param_groups[0]["lr"] = value
    with pytest.raises(zero_opt.ConfigError if value != value else zero_opt.ConfigTypeError) as caught:
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.flush()
    assert optimizer.state_dict()["param_groups"]  # what was edited stays readable
    optimizer.flush()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(param, before)
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("offload", [None, zero_opt.CPUOffload(), zero_opt.WorkerOffload()])
@pytest.mark.parametrize("value", ["0.1", None, float("nan")])
def test_a_learning_rate_that_cannot_work(value: Any, offload: Any) -> None:
    for message in run_processes(2, _edited, value, [0, 1], offload):
        assert "'lr' of param group 0" in message


def test_a_learning_rate_that_cannot_work_on_one_rank() -> None:
    first, second = run_processes(2, _edited, "0.1", [1], None)
    assert first == f"rank 1: {second}" and second == "'lr' of param group 0 must be a number, got '0.1'"
