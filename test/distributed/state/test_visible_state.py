"""What other threads see of ``opt.state`` while a step shows what it has made."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch

import zero_opt
from test.support.harness import run_processes

# A state_dict() that a lock keeps waiting is not waited for: it goes on after the step.
GLANCE_S = 1.0


class _Read(defaultdict[Any, Any]):
    """A ``state`` during whose first edit another thread calls ``state_dict()``."""

    def __init__(self, optimizer: zero_opt.ShardedOptimizer) -> None:
        super().__init__(dict)
        self._reader = threading.Thread(target=optimizer.state_dict)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._reader.ident is None:
            self._reader.start()
            self._reader.join(GLANCE_S)
        super().__setitem__(key, value)

    def ended(self) -> None:
        """The reader has ended."""
        self._reader.join()


def _read_beside_the_first_step(rank: int, world_size: int) -> list[torch.Tensor]:
    params = [torch.nn.Parameter(torch.ones(10)) for _ in range(6)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=zero_opt.AtStep())
    state = _Read(optimizer)
    if rank == 1:
        optimizer.state = state
    for _ in range(3):
        for param in params:
            param.grad = torch.full_like(param, rank + 1.0)
        optimizer.step()  # RankMismatch: state was dropped on rank 1, if its entries were taken for missing ones
    if rank == 1:
        state.ended()
    optimizer.close()
    return [param.detach() for param in params]


def test_entries_that_are_yet_to_be_shown_are_not_taken_for_dropped_ones() -> None:
    first, second = run_processes(2, _read_beside_the_first_step)
    assert all(map(torch.equal, first, second))
