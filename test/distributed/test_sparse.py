"""Sparse gradients where they cannot be taken; how they are reduced is part of test_equivalence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.distributed.harness import assert_bitwise, run_processes

EITHER = [zero_opt.AtStep(), zero_opt.AlreadyReduced()]


def _step_sparse(rank: int, world_size: int, reduction: Any, cls: Any) -> str:
    table = nn.Embedding(100, 4, sparse=True)
    zero_opt.broadcast_params(table)
    before = table.weight.detach().clone()
    optimizer = zero_opt.ShardedOptimizer(table.parameters(), cls, lr=0.1, reduction=reduction)
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        optimizer.step()
    assert_bitwise(table.weight.detach(), before)
    optimizer.zero_grad()
    table.weight.grad = torch.ones(100, 4)
    optimizer.step()
    optimizer.close()
    return str(caught.value)


@pytest.mark.parametrize("reduction", EITHER, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_an_elementwise_class_refuses_them_on_every_rank_and_names_the_way_out(cls: Any, reduction: Any) -> None:
    """torch's SGD and Adagrad take them, but here parameters of these are cut anywhere."""
    for message in run_processes(2, _step_sparse, reduction, cls, timeout=20):
        assert "parameter 0 " in message and "cut" in message and "SparseAdam" in message


def _backward_sparse(rank: int, world_size: int) -> str:
    table = nn.Embedding(100, 4, sparse=True)
    zero_opt.broadcast_params(table)
    optimizer = zero_opt.ShardedOptimizer(table.parameters(), torch.optim.SparseAdam)
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        table(torch.tensor([1, 3])).sum().backward()
    optimizer.close()
    return str(caught.value)


def test_overlapped_refuses_them_in_backward() -> None:
    for message in run_processes(2, _backward_sparse, timeout=20):
        assert "parameter 0 " in message and "AtStep()" in message and "SparseAdam" in message
