"""WorkerOffload(speculate=True): hyperparameters that are edited while steps are begun in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zero_opt
from test.support.failures import PATIENCE_S
from test.support.harness import assert_bitwise
from test.support.scenario import values
from test.support.worker_training import NOW, make, make_params

SPECULATING = zero_opt.WorkerOffload(speculate=True)


def _backward(params: list[nn.Parameter], optimizer: zero_opt.ShardedOptimizer, step: int) -> Any:
    """Return the placement, once all buckets are reduced, and their steps begun."""
    torch.autograd.backward(params, [values(step, 1, 0, i, tuple(p.shape)) for i, p in enumerate(params)])
    engine: Any = optimizer._engine
    for future in engine.reduction._futures:
        future.result(PATIENCE_S)
    return engine.placement


def test_an_lr_edited_between_backward_and_step_counts_in_that_step() -> None:
    def run(offload: Any) -> Any:
        params, counts = make_params(), []
        optimizer = make(params, offload=offload)
        for step in range(6):
            placement = _backward(params, optimizer, step)
            if step in (2, 4):
                optimizer.param_groups[0]["lr"] *= 0.25
            optimizer.step()
            optimizer.zero_grad()
            if offload is SPECULATING:
                counts.append((placement.kept > 0, placement.redone))
        state = optimizer.state_dict()["state"]
        optimizer.close()
        return [param.detach() for param in params], state, counts

    found, expected = run(SPECULATING), run(NOW)
    assert_bitwise(found[:2], expected[:2])
    redone = [count for _, count in found[2]]
    assert found[2][-1][0] and redone[1] == 0 < redone[2] == redone[3] < redone[4] == redone[5]


def test_param_groups_that_were_replaced_are_begun_with_their_own_values() -> None:
    params, kept = make_params(), []
    optimizer = make(params, offload=SPECULATING)
    for step in range(5):
        if step == 2:
            optimizer.param_groups = [{**group, "lr": group["lr"] * 0.5} for group in optimizer.param_groups]
        placement = _backward(params, optimizer, step)
        before = placement.kept
        optimizer.step()
        optimizer.zero_grad()
        kept.append(placement.kept > before)
    optimizer.close()
    assert kept[1:] == [True, False, True, True]  # the third step is the first to see the new groups
