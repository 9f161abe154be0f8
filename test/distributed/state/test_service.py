"""state_dict() on one rank alone, or on all at once, while the others are anywhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_opt
from test.support.harness import assert_bitwise, run_processes, run_threads
from test.support.scenario import BUCKET_MB, SHAPES, Case, backward_of, case, expected
from test.support.stepped import make_stepped, take_step
from zero_opt.state import consolidate

STEPS = 5
ADAMW = case(torch.optim.AdamW, {"lr": 0.02}, lr=0.01)
CASES = {
    "AdamW": ADAMW,
    "Adagrad": case(torch.optim.Adagrad, {"lr": 0.02}, lr=0.01),
    "Adafactor": replace(  # it cannot step an empty parameter
        case(torch.optim.Adafactor, {"lr": 0.02}, lr=0.01), shapes=tuple(shape for shape in SHAPES if 0 not in shape)
    ),
    "SGD": case(torch.optim.SGD, {"lr": 0.02}, lr=0.01, momentum=0.9),
}
REDUCTIONS = {
    "Overlapped": zero_opt.Overlapped(BUCKET_MB),
    "AtStep": zero_opt.AtStep(BUCKET_MB),
    "AlreadyReduced": zero_opt.AlreadyReduced(),
}


def _alone(rank: int, world_size: int, case: Case, reduction: Any, asks: Callable[[int, int], bool]) -> Any:
    """The state dicts that this rank asked for, by step, while the others went on."""
    delays = random.Random(rank)
    params = case.params()
    optimizer = case.sharded(params, reduction)
    found = {0: optimizer.state_dict()} if asks(rank, 0) else {}
    for step in range(STEPS):
        optimizer.zero_grad()
        backward_of(case, params, reduction, step, rank, world_size)
        time.sleep(delays.choice([0, 0, 0.001, 0.01]))
        optimizer.step()
        time.sleep(delays.choice([0, 0, 0.001, 0.01]))
        if asks(rank, step + 1):
            found[step + 1] = optimizer.state_dict()
    optimizer.close()
    return found


def _check(found: Any, case: Case, world_size: int, reduction: Any) -> None:
    for rank, dicts in enumerate(found):
        for step, state_dict in dicts.items():
            assert_bitwise(state_dict, expected(case, world_size, reduction, step)[1], f"rank {rank}, step {step}")


def _rank_0(rank: int, step: int) -> bool:
    return rank == 0


def _in_turn(rank: int, step: int) -> bool:
    return rank == step % 3


def _all(rank: int, step: int) -> bool:
    return True


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("asks", [_rank_0, _in_turn, _all])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_ranks_that_ask_have_the_state_of_their_step(world_size: int, asks: Any, reduction: str) -> None:
    found = run_processes(world_size, _alone, ADAMW, REDUCTIONS[reduction], asks)
    assert any(len(dicts) > 1 for dicts in found)
    _check(found, ADAMW, world_size, REDUCTIONS[reduction])


@pytest.mark.parametrize("name", CASES)
def test_whatever_the_class_keeps(name: str) -> None:
    reduction = REDUCTIONS["Overlapped"]
    found = run_processes(3, _alone, CASES[name], reduction, _rank_0)
    _check(found, CASES[name], 3, reduction)


def _in_small_messages(rank: int, world_size: int) -> Any:
    consolidate._CHUNK_BYTES = 256
    return _alone(rank, world_size, ADAMW, REDUCTIONS["AtStep"], _rank_0)


def test_tensors_may_take_many_messages() -> None:
    found = run_processes(2, _in_small_messages)
    _check(found, ADAMW, 2, REDUCTIONS["AtStep"])


def _beside_consolidate(rank: int, world_size: int, offload: Any, flush: bool) -> Any:
    consolidate._CHUNK_BYTES = 512
    params, optimizer = make_stepped(2, offload=offload)
    if flush:
        with pytest.raises(zero_opt.StepPending, match="flush"):
            optimizer.state_dict()
        optimizer.flush()
    mine = optimizer.state_dict() if rank == 0 else None
    optimizer.consolidate_state_dict(to=0)
    theirs = optimizer.state_dict() if rank == 0 else None
    take_step(params, optimizer)
    if flush:
        optimizer.flush()
    after = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return mine, theirs, after


@pytest.mark.parametrize(
    ("offload", "flush"),
    [(None, False), (zero_opt.WorkerOffload(), False), (zero_opt.WorkerOffload(delay=1), True)],
)
def test_it_is_what_consolidate_brings(offload: Any, flush: bool) -> None:
    mine, theirs, after = run_processes(2, _beside_consolidate, offload, flush)[0]
    assert_bitwise(mine, theirs)
    assert [list(state) for state in mine["state"].values()] == [list(state) for state in theirs["state"].values()]
    assert after["state"][0]["step"] == mine["state"][0]["step"] + 1


def _after_changes(rank: int, world_size: int) -> Any:
    params, optimizer = make_stepped()
    more = [nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(3), requires_grad=False)]
    optimizer.add_param_group({"params": more, "lr": 0.5})
    added = optimizer.state_dict() if rank == 1 else None
    take_step([*params, more[0]], optimizer)
    stepped = optimizer.state_dict()
    loaded = {**stepped, "state": {i: {**s, "exp_avg": s["exp_avg"] + 1} for i, s in stepped["state"].items()}}
    optimizer.load_state_dict(loaded)
    again = optimizer.state_dict() if rank == 1 else None
    optimizer.close()
    return added, loaded, again


def test_groups_that_are_added_and_state_that_is_loaded_are_in_it() -> None:
    added, loaded, again = run_processes(2, _after_changes)[1]
    assert len(added["param_groups"]) == 2
    assert sorted(added["state"]) == [0, 1, 2, 3]
    assert sorted(loaded["state"]) == [0, 1, 2, 3, 4]
    assert_bitwise(again, loaded)


def _two_optimizers(rank: int, world_size: int) -> Any:
    (first_params, first), (second_params, second) = make_stepped(), make_stepped(2)
    found = None
    if rank == 0:
        found = first.state_dict(), second.state_dict()
        _scribble(first.state_dict())
    kept = {index: state["exp_avg"].clone() for index, state in found[0]["state"].items()} if found else {}
    take_step(first_params, first)
    take_step(second_params, second)
    if found is not None:
        assert all(torch.equal(found[0]["state"][index]["exp_avg"], value) for index, value in kept.items())
        assert first.state_dict()["state"][0]["step"] == 2
        assert float(first.state_dict()["state"][0]["exp_avg"].abs().max()) < 100
    first.close()
    second.close()
    return found


def _scribble(state_dict: Any) -> None:
    for state in state_dict["state"].values():
        state["exp_avg"].fill_(1e6)


def test_two_optimizers_are_asked_each_and_nothing_is_shared_with_them() -> None:
    found = run_processes(2, _two_optimizers)[0]
    assert [state_dict["state"][0]["step"] for state_dict in found] == [1, 2]


def _idle(rank: int, world_size: int) -> float:
    _, optimizer = make_stepped()
    dist.barrier()
    begun = time.process_time()
    time.sleep(1)
    spent = time.process_time() - begun
    dist.barrier()
    optimizer.close()
    return spent


def test_waiting_to_be_asked_costs_nothing() -> None:
    assert max(run_processes(2, _idle)) < 0.02


def _at_threads(rank: int, world_size: int) -> str:
    _, optimizer = make_stepped()
    with pytest.raises(zero_opt.StateNotConsolidated) as caught:
        optimizer.state_dict()
    optimizer.close()
    return str(caught.value)


def test_without_messages_between_ranks_it_says_to_consolidate() -> None:
    assert "consolidate_state_dict" in run_threads(2, _at_threads)[0]
