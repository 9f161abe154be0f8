"""What other threads see of ``opt.state`` while a step shows what it has made."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
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


def _full_shape_value(rank: int, world_size: int, moments: Any) -> torch.Tensor:
    param = torch.nn.Parameter(torch.ones(33, 65))
    optimizer = zero_opt.ShardedOptimizer([param], zero_opt.CPUAdamW, state=zero_opt.AdamState(moments))
    full = torch.linspace(0.0, 1.0, param.numel()).to(torch.bfloat16).float().reshape(param.shape)
    for step in range(2):
        param.grad = torch.zeros_like(param)
        optimizer.step()
        if step == 0:
            optimizer.state[param]["exp_avg"] = full
    optimizer.consolidate_state_dict(to=0)
    return (optimizer.state_dict()["state"][0]["exp_avg"] / 0.9 - full).abs().max() if rank == 0 else torch.zeros(())


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_value_in_full_shape_is_cut(moments: str) -> None:
    """Of bf16 the largest relative rounding is 2^-8, once for the product, of values up to 1."""
    first, _ = run_processes(2, _full_shape_value, moments)
    assert first <= (2**-8 if moments == "bfloat16" else 1e-6)


def _step_counts(rank: int, world_size: int, looks: int) -> list[float]:
    params = [torch.nn.Parameter(torch.ones(64)) for _ in range(4)]
    optimizer = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, reduction=zero_opt.AtStep())
    for step in range(4):
        for param in params:
            param.grad = torch.ones(64)
        optimizer.step()
        for param in params[1:3] if step == 1 else ():
            moments = {key: torch.ones(64) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(6.0), **moments}
        for _ in range(looks if step == 1 else 0):
            optimizer.state_dict()
        optimizer.zero_grad()
    return [float(optimizer.state[param]["step"]) for param in params]


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_look_at_edited_entries_does_not_hide_the_edit(looks: int) -> None:
    assert run_processes(2, _step_counts, looks) == [[4.0, 8.0, 8.0, 4.0]] * 2


def _dropped_under_delay(rank: int, world_size: int) -> list[float]:
    """An entry is dropped of a parameter alone of its kind, which steps that are brought in later make anew."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((64,), (64,), (), (8, 8))]
    optimizer = zero_opt.ShardedOptimizer(
        params, torch.optim.AdamW, fused=True, offload=zero_opt.WorkerOffload(threads=1, delay=1)
    )
    for step in range(5):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.flush()
            del optimizer.state[params[2]]
    optimizer.flush()
    counts = [float(optimizer.state[param]["step"]) for param in params]
    optimizer.close()
    return counts


def test_entries_that_were_dropped_before_late_steps_start_afresh() -> None:
    assert run_processes(2, _dropped_under_delay) == [[5.0, 5.0, 3.0, 5.0]] * 2
