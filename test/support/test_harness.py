"""The harness keeps its promises: every rank runs, a failure has its rank, a hang has its name and an end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .harness import (
    Failure,
    RankFailed,
    RanksHang,
    assert_bitwise,
    bitwise_difference,
    run_processes,
    run_threads,
)

Runner = Callable[..., list[Any]]
both = pytest.mark.parametrize("run", [run_threads, run_processes])


def _sum_of_ranks(rank: int, world_size: int, base: float) -> torch.Tensor:
    value = torch.full((3,), base + rank)
    dist.all_reduce(value)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    return value


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise LookupError("nothing here")
    dist.barrier()


def _hang_on_one(rank: int, world_size: int, seconds: float) -> int:
    if rank == 1:
        _hang_here(seconds)
    return rank


def _hang_here(seconds: float) -> None:
    time.sleep(seconds)


def _wait_on_one(rank: int, world_size: int, seconds: float) -> None:
    if rank == 0:
        dist.barrier()


def _hang(run: Runner, fn: Callable[..., Any], said: str) -> str:
    """Return how a hang is reported. A busy machine gets more time for what comes before the hang."""
    for seconds in (1.5, 15.0, 150.0):
        with pytest.raises(RanksHang) as caught:
            run(2, fn, 20 * seconds, timeout=seconds)
        if said in str(caught.value):
            break
    return str(caught.value)


@both
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_runs_and_results_come_in_order(run: Runner, world_size: int) -> None:
    results = run(world_size, _sum_of_ranks, 10.0)
    expected = torch.full((3,), 10.0 * world_size + sum(range(world_size)))
    assert_bitwise(results, [expected] * world_size)
    assert not dist.is_initialized()


@both
def test_arguments_may_be_closures(run: Runner) -> None:
    seen = torch.arange(4)
    assert run(2, lambda rank, world_size: int(seen.sum()) + rank) == [6, 7]


@both
def test_an_exception_keeps_its_type_and_names_its_rank(run: Runner) -> None:
    with pytest.raises(LookupError, match="nothing here") as caught:
        run(2, _fail_on_one)
    assert any("rank 1" in note for note in caught.value.__notes__)
    # The failure has left nothing behind.
    assert_bitwise(run(2, _sum_of_ranks, 0.0), [torch.ones(3)] * 2)


@both
def test_a_hang_is_reported_by_rank_and_stack(run: Runner) -> None:
    said = _hang(run, _hang_on_one, "ranks [1] of 2")
    assert "ranks [1] of 2" in said and "_hang_here" in said
    assert_bitwise(run(2, _sum_of_ranks, 0.0), [torch.ones(3)] * 2)


@both
def test_a_rank_stuck_in_a_collective_is_a_hang_too(run: Runner) -> None:
    assert "ranks [0] of 2" in _hang(run, _wait_on_one, "ranks [0] of 2")


def test_a_stopped_rank_does_not_hide_the_stack_of_another() -> None:
    def one_stops(rank: int, world_size: int, seconds: float) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        _hang_here(seconds)

    said = _hang(run_processes, one_stops, "_hang_here")
    assert said.count("no stack") == 1 and "_hang_here" in said


def test_a_death_is_noticed_beside_a_process_of_the_rank_s_own() -> None:
    reading, writing = os.pipe()

    def one_dies(rank: int, world_size: int) -> None:
        if os.fork() == 0:  # lives until the test is over, and holds the rank's pipes
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed, match="rank 0: Died: killed by signal 9"):
        run_processes(1, one_dies, backend=None)
    os.close(writing)
    os.close(reading)


def test_threads_have_subgroups() -> None:
    def sum_in_pairs(rank: int, world_size: int) -> float:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=pairs[rank // 2])
        return value.item()

    assert run_threads(4, sum_in_pairs) == [1.0, 1.0, 5.0, 5.0]


def test_failures_and_deaths_are_values_when_expected() -> None:
    def different_ends(rank: int, world_size: int) -> str:
        if rank == 0:
            raise KeyError("lr")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return "fine"

    first, second, third = run_processes(3, different_ends, expect_errors=True)
    assert isinstance(first, Failure) and isinstance(first.exception, KeyError)
    assert "different_ends" in first.traceback
    assert isinstance(second, Failure) and second.type_name == "Died" and "signal 9" in second.message
    assert third == "fine"


def test_a_death_is_raised_with_its_rank() -> None:
    with pytest.raises(RankFailed, match="rank 0: Died: killed by signal 9"):
        run_processes(1, lambda rank, world_size: os.kill(os.getpid(), signal.SIGKILL))


def test_a_stopped_rank_may_be_left_behind() -> None:
    def one_stops(rank: int, world_size: int) -> int:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return rank

    first, second = run_processes(2, one_stops, may_hang={1})
    assert first == 0 and second.type_name == "Hang"


def test_an_exception_that_does_not_pickle_still_arrives() -> None:
    def raise_local(rank: int, world_size: int) -> None:
        class Local(Exception):
            pass

        raise Local("from far")

    with pytest.raises(RankFailed, match="rank 0: Local: from far"):
        run_processes(1, raise_local)


def test_the_group_can_be_left_to_the_function() -> None:
    assert run_processes(2, lambda rank, world_size: dist.is_initialized(), backend=None) == [False, False]


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), "1 of 2 elements differ, the first at flat"),
        (torch.tensor(0.0), torch.tensor(-0.0), "max 0 ulp"),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-22]), "max 2 ulp"),
        (torch.ones(1).bfloat16(), -torch.ones(1).bfloat16(), "max 32512 ulp"),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), "1 of 2 elements differ"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "torch.float32 (2,)"),
        (torch.zeros(2), torch.zeros(1, 2), "(1, 2)"),
        ({"a": {"b": [torch.zeros(1)]}}, {"a": {"b": [torch.ones(1)]}}, "['a']['b'][0]: 1 of 1"),
        ({"a": 1}, {"b": 1}, "['a']: only in the first"),
        ([1, 2], [1], "lengths 2 and 1"),
        (1.0, 1, "1.0 and 1"),
        (0.0, -0.0, "0.0 and -0.0"),
    ],
)  # fmt: skip
def test_bitwise_finds_and_says_what_differs(a: object, b: object, said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_bitwise(a, b)
    assert said in str(caught.value)


def test_bitwise_takes_equal_bits_for_equal() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    strided = torch.arange(6.0).view(2, 3).t()
    state = {"p": nan, "q": (strided, float("nan")), "flag": torch.tensor(True), 0: None}
    same = {"p": nan.clone(), "q": (strided.contiguous(), float("nan")), "flag": torch.tensor(True), 0: None}
    assert not list(bitwise_difference(state, same))
