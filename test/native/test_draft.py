"""A draft writes to the other bank what a step would write in place, and leaves the first one alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from test.native.forms import EDGES, FORMS, ISAS, group_of
from test.native.kernels import HYPERS, same_bits
from test.native.workers import ALIGN, MAX_RUNS, Arena, Group, copied, worker_on
from zero_opt import _native

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.uint8: "uint8"}
LARGE = 2_500_001  # of three pieces


@dataclass(frozen=True)
class Banks:
    """A group in an arena, and a second bank of its state, filled with something else."""

    group: Group
    other: Sequence[Mapping[str, Tensor]]

    def batch(self) -> tuple[_native.Hypers, list[_native.UpdateRun], list[int]]:
        runs = []
        for run, to, grad in zip(self.group.runs, self.other, self.group.grads):
            out = run.get("out")
            runs.append(
                _native.UpdateRun(
                    grad.numel(),
                    {role: tensor.data_ptr() for role, tensor in run.items()},
                    grad_dtype=NAMES[grad.dtype],
                    moment_dtype=NAMES[run["exp_avg"].dtype],
                    out_dtype="float32" if out is None else NAMES[out.dtype],
                    step=self.group.step,
                    to={role: tensor.data_ptr() for role, tensor in to.items()},
                )
            )
        hypers = _native.Hypers("adam", **{**HYPERS, **self.group.options})
        return hypers, runs, [grad.data_ptr() for grad in self.group.grads]


def _spoilt(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).bitwise_not().view(tensor.dtype)


@contextmanager
def banks_for(groups: Sequence[Group], lanes: int) -> Iterator[tuple[Arena, list[Banks]]]:
    tensors = [tensor for group in groups for tensor in group.tensors()]
    arena = Arena(lanes, 2 * sum(tensor.numel() * tensor.element_size() + ALIGN for tensor in tensors))
    try:
        placed = copied(groups, arena.place)
        others = [
            [
                {role: arena.place(_spoilt(tensor)) for role, tensor in run.items() if role != "out"}
                for run in group.runs
            ]
            for group in groups
        ]
        yield arena, [Banks(group, other) for group, other in zip(placed, others, strict=True)]
    finally:
        arena.close()


def check(banks: Sequence[Banks], groups: Sequence[Group], isa: str = "") -> None:
    """The other bank and ``out`` are what a step of the groups makes; the first bank is what it was."""
    expected = copied(groups)
    _native.update_step([group.batch() for group in expected], isa=isa)
    for bank, group, after in zip(banks, groups, expected, strict=True):
        for placed, other, before, made in zip(bank.group.runs, bank.other, group.runs, after.runs, strict=True):
            assert all(same_bits(tensor, made[role]) for role, tensor in other.items())
            assert all(torch.equal(tensor, before[role]) for role, tensor in placed.items() if role != "out")
            assert "out" not in made or same_bits(placed["out"], made["out"])


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_the_step_in_place(form: str, isa: str, lanes: int) -> None:
    groups = [group_of(EDGES, form), group_of([700, 0, 9], form, amsgrad=True, decoupled=False)]
    with banks_for(groups, lanes) as (arena, banks):
        drafted = arena.control.draft([bank.batch() for bank in banks], arena.wake, isa=isa)
        assert drafted == arena.control.drafted == 8  # those without elements do not count
        assert arena.control.drafts_done == 0
        arena.control.finish(arena.lanes)
        assert arena.control.drafts_done == drafted
        check(banks, groups, isa)


@pytest.mark.parametrize(("lanes", "threads"), [(2, 2), (64, 3)])
def test_long_runs_are_made_in_pieces(lanes: int, threads: int) -> None:
    groups = [group_of([LARGE, 5], "bf16 in and out")]
    with banks_for(groups, lanes) as (arena, banks):
        assert arena.control.draft([banks[0].batch()], arena.wake) == 4
        arena.control.finish(threads)
        check(banks, groups)


def test_void_drafts_are_not_made_and_what_comes_after_is() -> None:
    groups = [group_of([1000], "fp32"), group_of([1000], "fp32")]
    with banks_for(groups, 2) as (arena, banks):
        before = [{role: tensor.clone() for role, tensor in run.items()} for run in banks[0].other]
        arena.control.draft([banks[0].batch()], arena.wake)
        arena.control.void_drafts()
        arena.control.draft([banks[1].batch()], arena.wake)
        arena.control.finish(arena.lanes)
        assert arena.control.drafts_done == 2
        check(banks[1:], groups[1:])
        assert all(same_bits(tensor, before[0][role]) for role, tensor in banks[0].other[0].items())


def test_the_mode_of_subnormal_numbers_is_that_asked_for() -> None:
    groups = [group_of([3000], "fp32")]
    with banks_for(groups, 1) as (arena, banks):
        expected = copied(groups)
        _native.update_step([group.batch() for group in expected], flush_denormals=True)
        arena.control.draft([banks[0].batch()], arena.wake, flush_denormals=True)
        arena.control.finish(arena.lanes)
        assert same_bits(banks[0].other[0]["exp_avg_sq"], expected[0].runs[0]["exp_avg_sq"])
    assert not _native.flushes_denormals()


def test_what_cannot_be_drafted_is_refused_and_nothing_is() -> None:
    groups = [group_of([100], "bf16 in and out")]
    with banks_for(groups, 1) as (arena, [bank]):
        placed = bank.group
        in_place = [{role: tensor for role, tensor in placed.runs[0].items() if role != "out"}]
        with pytest.raises(ValueError, match="may have to read again"):
            arena.control.draft([Banks(placed, in_place).batch()], arena.wake)
        over = Banks(Group(placed.runs, [bank.other[0]["exp_avg"]]), bank.other)
        with pytest.raises(ValueError, match="may have to read again"):
            arena.control.draft([over.batch()], arena.wake)
        with pytest.raises(ValueError, match="may have to read again"):
            arena.control.draft([placed.batch()], arena.wake)
        with pytest.raises(ValueError, match="made where the state is"):
            arena.control.submit([bank.batch()], arena.wake)
        with pytest.raises(ValueError, match="same arrays of state"):
            Banks(placed, [{"param": bank.other[0]["param"]}]).batch()
        with pytest.raises(ValueError, match="same arrays of state"):
            Banks(placed, [{**bank.other[0], "max_exp_avg_sq": bank.other[0]["exp_avg"]}]).batch()
        with pytest.raises(ValueError, match="out and step are not"):
            Banks(placed, [{**bank.other[0], "step": torch.zeros(1)}]).batch()
        assert arena.control.drafted == arena.control.submitted == 0


def test_there_is_room_again_when_drafts_are_done() -> None:
    groups = [group_of([64], "fp32")]
    with banks_for(groups, 1) as (arena, [bank]):
        for _ in range(3):
            for _ in range(MAX_RUNS):
                arena.control.draft([bank.batch()], arena.wake)
            before = arena.control.drafted
            with pytest.raises(OverflowError, match="until some are done"):
                arena.control.draft([bank.batch()], arena.wake)
            assert arena.control.drafted == before
            arena.control.finish(arena.lanes)


def test_a_worker_makes_them_and_its_successor_what_it_left() -> None:
    groups = [group_of([300_001], "bf16 in and out", lr=0.001 * number) for number in range(1, 4)]
    with banks_for(groups, 2) as (arena, banks):
        with worker_on(arena) as worker:
            worker.wait_ready()
            arena.control.draft([banks[0].batch()], arena.wake)
            drafted = arena.control.draft([banks[1].batch()], arena.wake)
            worker.kill()
            assert arena.control.wait_drafts(drafted, arena.done, worker.pidfd, 1.0) in ("dead", "done")
        drafted = arena.control.draft([banks[2].batch()], arena.wake)
        with worker_on(arena) as successor:
            while (state := arena.control.wait_drafts(drafted, arena.done, successor.pidfd, 1.0)) == "waiting":
                pass
            assert state == "done"
        check(banks, groups)
