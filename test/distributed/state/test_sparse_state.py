"""A class that keeps sparse state: it steps, and whatever saves says on every rank that the state cannot be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes


class WholeSGD(torch.optim.SGD):
    """Steps whole parameters; of sparse gradients its ``momentum_buffer`` is sparse."""


# Small tensors are read for the listing; large ones travel after it.
ROWS = {"small": 4, "large": 40}
CALLS: dict[str, Callable[[zero_opt.ShardedOptimizer], Any]] = {
    "state_dict": lambda opt: opt.state_dict(),
    "consolidate": lambda opt: opt.consolidate_state_dict(to=0),
    "sharded": zero_opt.sharded_state_dict,
}
SAID = (
    "state 'momentum_buffer' of parameter 0 is torch.sparse_coo, not a dense tensor with values, so it cannot be "
    "saved; use a class whose state is dense, as torch.optim.SparseAdam, or dense gradients "
    "(sparse=False in the module)"
)


def _step(opt: torch.optim.Optimizer, embedding: nn.Embedding) -> None:
    opt.zero_grad()
    embedding(torch.tensor([1, 2, 1])).sum().backward()
    opt.step()


def _refused(rank: int, world_size: int, rows: int, offload: Any) -> torch.Tensor:
    torch.manual_seed(0)
    embedding = nn.Embedding(rows, 3, sparse=True)
    opt = zero_opt.ShardedOptimizer(
        embedding.parameters(), WholeSGD, lr=0.5, momentum=0.5, reduction=zero_opt.AtStep(), offload=offload
    )
    _step(opt, embedding)
    for call in CALLS.values():
        with pytest.raises(zero_opt.StateDictError) as caught:
            call(opt)
        assert str(caught.value).removeprefix("rank 0: ") == SAID
    _step(opt, embedding)
    opt.close()
    return embedding.weight.detach()


# On one rank without an offload the wrapped class itself saves it.
@pytest.mark.parametrize(("world_size", "offload"), [(2, None), (1, zero_opt.CPUOffload()), (2, zero_opt.CPUOffload())])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_sparse_state_is_refused_where_it_is_saved(world_size: int, rows: int, offload: Any) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(rows, 3, sparse=True)
    opt = WholeSGD(embedding.parameters(), lr=0.5, momentum=0.5)
    for _ in range(2):
        _step(opt, embedding)
    for found in run_processes(world_size, _refused, rows, offload):
        assert_bitwise(found, embedding.weight.detach())
