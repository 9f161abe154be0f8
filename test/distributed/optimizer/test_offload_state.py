"""State that leaves the device between phases and comes back; on the CPU it is there already."""

from __future__ import annotations

import tempfile
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

import zero_opt
from test.support.harness import assert_bitwise, run_processes
from test.support.stepped import make_stepped, take_step

TIERS: dict[str, Any] = {
    "device": {},
    "masters": {"precision": zero_opt.MixedPrecision(torch.float32)},
    "host": {"offload": zero_opt.CPUOffload()},
    "worker": {"offload": zero_opt.WorkerOffload()},
    "file": {"offload": zero_opt.NVMeOffload(tempfile.gettempdir())},
}


def _away_and_back(rank: int, world_size: int, options: dict[str, Any], away: bool) -> Any:
    params, optimizer = make_stepped(2, **options)
    shown = {index: dict(optimizer.state[param]) for index, param in enumerate(params)}
    if away:
        optimizer.offload_state()
        for refused in (optimizer.step, partial(optimizer.clip_grad_norm_, 1.0)):
            with pytest.raises(zero_opt.StateOffloaded, match="reload_state"):
                refused()
        saved = optimizer.state_dict() if rank == 0 else None
        with pytest.raises(zero_opt.StateOffloaded):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        with pytest.raises(zero_opt.StateOffloaded):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        optimizer.consolidate_state_dict()
        if rank == 0:
            assert_bitwise(optimizer.state_dict(), saved)
        optimizer.reload_state()
        for index, param in enumerate(params):
            assert all(optimizer.state[param][key] is value for key, value in shown[index].items())
    take_step(params, optimizer)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return [param.detach() for param in params], state


@pytest.mark.parametrize("tier", TIERS)
def test_training_goes_on_as_if_it_had_not_left(tier: str) -> None:
    for world_size in (1, 2):
        stayed, left = (run_processes(world_size, _away_and_back, TIERS[tier], away) for away in (False, True))
        assert_bitwise(left, stayed)


@pytest.mark.parametrize("call", ["offload_state", "reload_state"])
def test_state_stays_where_it_is_while_a_thread_reads_it(call: str) -> None:
    _, optimizer = make_stepped(2, **TIERS["host"])
    guard, moved = optimizer._engine._guard, threading.Event()
    thread = threading.Thread(target=lambda: (getattr(optimizer, call)(), moved.set()))
    with guard.reading():
        thread.start()
        while not guard._waiting and thread.is_alive():
            time.sleep(0.001)
        assert not moved.is_set()
    thread.join()
    assert moved.is_set()
    optimizer.close()


def test_gradients_that_are_reduced_already_survive() -> None:
    results = []
    for away in (False, True):
        params, optimizer = make_stepped(1, offload=zero_opt.CPUOffload())
        optimizer.zero_grad()
        torch.autograd.backward(params, [torch.full_like(param, 0.25) for param in params])
        if away:
            optimizer.offload_state()
            optimizer.reload_state()
        optimizer.step()
        optimizer.close()
        results.append([param.detach() for param in params])
    assert_bitwise(results[0], results[1])


def test_no_state_comes_back_after_the_end() -> None:
    for options in ({}, {"offload": zero_opt.CPUOffload()}):
        optimizer = zero_opt.ShardedOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.AdamW, **options)
        optimizer.offload_state()
        optimizer.close()
        with pytest.raises(zero_opt.OptimizerClosed):
            optimizer.reload_state()
