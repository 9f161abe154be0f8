"""Sparse gradients where they cannot be taken, and clipped; how they are reduced is part of test_equivalence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes

EITHER = [zero_opt.AtStep(), zero_opt.AlreadyReduced()]


def _step_sparse(rank: int, world_size: int, reduction: Any, cls: Any, thawed: bool) -> str:
    table = nn.Embedding(100, 4, sparse=True)
    zero_opt.broadcast_params(table)
    before = table.weight.detach().clone()
    table.requires_grad_(not thawed)
    optimizer = zero_opt.ShardedOptimizer(table.parameters(), cls, lr=0.1, reduction=reduction)
    table.requires_grad_(True)
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
@pytest.mark.parametrize("thawed", [False, True], ids=["trainable", "thawed"])
def test_an_elementwise_class_refuses_them_on_every_rank_and_names_the_way_out(
    thawed: bool, cls: Any, reduction: Any
) -> None:
    """torch's SGD and Adagrad take them, but here parameters of these are cut anywhere."""
    for message in run_processes(2, _step_sparse, reduction, cls, thawed):
        assert "parameter 0 " in message and "cut" in message and "SparseAdam" in message


def _thawed(rank: int, world_size: int, reduction: Any) -> None:
    """The first step of a table that was frozen when the optimizer was made plans it, by a sparse gradient."""
    torch.manual_seed(5)
    ours, other = nn.Embedding(100, 4, sparse=True), nn.Embedding(10, 4, sparse=True)
    plain = nn.Embedding(100, 4, sparse=True, _weight=ours.weight.detach().clone())
    ours.requires_grad_(False)
    params = [*ours.parameters(), *other.parameters()]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.SparseAdam, lr=0.1, reduction=reduction)
    theirs = torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    ours.requires_grad_(True)
    for _ in range(2):
        for table in (ours, plain):
            table(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    optimizer.close()
    assert_bitwise(ours.weight, plain.weight)


@pytest.mark.parametrize("reduction", EITHER, ids=lambda policy: type(policy).__name__)
def test_of_a_parameter_that_the_step_plans(reduction: Any) -> None:
    run_processes(2, _thawed, reduction)


def _tied(rank: int, world_size: int) -> None:
    """One weight in a linear layer, whose gradient is dense, and after that in an embedding with sparse gradients."""
    torch.manual_seed(5)
    ours = nn.Parameter(torch.randn(100, 4))
    plain = nn.Parameter(ours.detach().clone())
    optimizer = zero_opt.ShardedOptimizer([ours], torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD([plain], lr=0.1)
    for _ in range(2):
        for weight in (ours, plain):
            nn.functional.linear(torch.ones(1, 4), weight).sum().backward()
            for _ in range(2):
                nn.functional.embedding(torch.tensor([1, 3, 3]), weight, sparse=True).sum().backward()
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    optimizer.close()
    assert_bitwise(ours, plain)


def test_overlapped_adds_them_to_dense_ones() -> None:
    run_processes(2, _tied)


def _backward_sparse(rank: int, world_size: int) -> str:
    table = nn.Embedding(100, 4, sparse=True)
    zero_opt.broadcast_params(table)
    optimizer = zero_opt.ShardedOptimizer(table.parameters(), torch.optim.SparseAdam)
    with pytest.raises(zero_opt.UnsupportedParam) as caught:
        table(torch.tensor([1, 3])).sum().backward()
    optimizer.close()
    return str(caught.value)


def test_overlapped_refuses_them_in_backward() -> None:
    for message in run_processes(2, _backward_sparse):
        assert "parameter 0 " in message and "AtStep()" in message and "SparseAdam" in message


def _clipped(rank: int, world_size: int, reduction: Any) -> None:
    torch.manual_seed(5)
    ours = nn.Embedding(10, 4, sparse=True)
    plain = nn.Embedding(10, 4, sparse=True, _weight=ours.weight.detach().clone())
    optimizer = zero_opt.ShardedOptimizer(ours.parameters(), torch.optim.SparseAdam, lr=0.1, reduction=reduction)
    theirs = torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    for limit in (1.0, 1e9):  # the first step has smaller moments if it is clipped
        for table in (ours, plain):
            (table(torch.tensor([1, 3, 3])) * 100).sum().backward()
        norm = optimizer.clip_grad_norm_(limit)
        whole = plain.weight.grad.coalesce()
        torch.testing.assert_close(norm, whole.values().norm())
        coefficient = torch.clamp(limit / (whole.values().norm() + 1e-6), max=1.0)
        plain.weight.grad = torch.sparse_coo_tensor(
            whole.indices(), whole.values() * coefficient, whole.shape, check_invariants=True
        )
        torch.testing.assert_close(ours.weight.grad.to_dense(), plain.weight.grad.to_dense())
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    torch.testing.assert_close(ours.weight, plain.weight)


@pytest.mark.parametrize("reduction", EITHER, ids=lambda policy: type(policy).__name__)
def test_they_are_clipped_as_dense_ones(reduction: Any) -> None:
    """At world size 1 torch clips, which refuses sparse gradients."""
    run_processes(2, _clipped, reduction)
