"""A step through the redo log has the bits of a step in place, in every format, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from test.native.forms import EDGES, FORMS, ISAS, group_of
from test.native.workers import MAX_RUNS, Arena, Group, all_same, arena_for, copied
from zero_opt import _native


def check(groups: list[Group], lanes: int, isa: str = "", threads: int = 2) -> None:
    """The step here through the log, against the one in place."""
    expected = copied(groups)
    nonfinite = _native.update_step([group.batch() for group in expected], isa=isa)
    with arena_for(groups, lanes) as (arena, placed):
        assert arena.submit(placed, isa=isa) == 1
        arena.control.finish(threads)
        assert arena.control.completed == 1
        assert arena.control.nonfinite == nonfinite
        assert all_same(placed, expected)


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_the_step_in_place(form: str, isa: str, lanes: int) -> None:
    check([group_of(EDGES, form), group_of([700, 0, 9], form, lr=0.5, weight_decay=0.0)], lanes, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
def test_bits_past_the_caches(form: str, isa: str) -> None:
    groups = [group_of(EDGES, form), group_of([700, 64, 9], form, amsgrad=True)]
    expected = copied(groups)
    _native.update_step([group.batch() for group in expected], isa=isa)
    with arena_for(groups, 3) as (arena, placed):
        arena.submit(placed, isa=isa, past_caches=True)
        arena.control.finish(2)
        assert arena.control.step_seconds > 0
        assert all_same(placed, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", FORMS)
def test_the_maximum_and_l2_decay(form: str, isa: str) -> None:
    check([group_of(EDGES, form, amsgrad=True, decoupled=False), group_of(EDGES, form, beta1=0.3)], 2, isa)


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(0, 1500), min_size=1, max_size=8), lanes=st.integers(1, 5))
def test_any_sizes_over_any_lanes(sizes: list[int], lanes: int) -> None:
    check([group_of(sizes[:2], "fp32"), *(group_of(sizes[i:], "8-bit moments") for i in (2,) if sizes[i:])], lanes)


@pytest.mark.parametrize(("lanes", "threads"), [(2, 2), (7, 2), (2, 5), (64, 3), (3, 1), (3, 0)])
def test_a_step_large_enough_for_threads(lanes: int, threads: int) -> None:
    check([group_of([300_001, 5, 100_000], "bf16 in and out")], lanes, threads=threads)


def test_a_step_of_nothing() -> None:
    with arena_for([], 2) as (arena, _):
        assert arena.submit([]) == 1
        arena.control.finish(arena.lanes)
        assert (arena.control.completed, arena.control.nonfinite) == (1, 0)


def test_steps_follow_each_other_and_read_the_count_that_is_kept() -> None:
    groups = [group_of([1000], "fp32")]
    groups[0].runs[0]["step"] = torch.zeros(1)  # type: ignore[index]
    expected = copied(groups)
    with arena_for(groups, 2) as (arena, placed):
        for number in range(1, 5):
            _native.update_step([group.batch() for group in expected])
            before = arena.control.progress
            assert arena.submit(placed) == number == arena.control.submitted
            arena.control.finish(arena.lanes)
            assert placed[0].runs[0]["step"].item() == number - 1, "counts are the trainer's"
            placed[0].runs[0]["step"].fill_(number)
            assert all_same(placed, expected)
            assert all(a != b for a, b in zip(before[: arena.lanes], arena.control.progress))


def test_subnormal_numbers_are_flushed_on_request() -> None:
    kept, flushed = (group_of([3000], "fp32") for _ in range(2))
    for group, flush in ((kept, False), (flushed, True)):
        expected = copied([group])
        _native.update_step([group.batch() for group in expected], flush_denormals=flush)
        with arena_for([group], 2) as (arena, placed):
            arena.submit(placed, flush_denormals=flush)
            arena.control.finish(arena.lanes)
            assert all_same(placed, expected)


def test_what_cannot_be_submitted_is_refused_and_nothing_is() -> None:
    outside, inside = group_of([100], "fp32"), group_of([100] * 2, "bf16 in and out")
    with arena_for([inside], 1) as (arena, [placed]):
        with pytest.raises(ValueError, match="400 bytes does not lie in the arena's data"):
            arena.submit([outside])
        with pytest.raises(ValueError, match="every run needs"):
            arena.control.submit([(placed.batch()[0], placed.batch()[1], [])], arena.wake)
        over = Group([{**placed.runs[0], "out": placed.grads[0]}], placed.grads[:1])
        with pytest.raises(ValueError, match="overwrite the gradient"):
            arena.submit([over])
        many = Group(list(placed.runs) * MAX_RUNS, list(placed.grads) * MAX_RUNS)
        with pytest.raises(ValueError, match=f"more runs than the {MAX_RUNS}"):
            arena.submit([many])
        with pytest.raises(RuntimeError, match="'v9'"):
            arena.submit([placed], isa="v9")
        assert arena.control.submitted == 0
        arena.submit([placed])
        with pytest.raises(ValueError, match="step 1 is not finished"):
            arena.submit([placed])
        arena.control.finish(arena.lanes)
        assert arena.control.submitted == arena.control.completed == 1


def test_the_control_area_is_not_data() -> None:
    group = group_of([64], "fp32")
    with arena_for([group], 1) as (arena, [placed]):
        front = arena.bytes[4096 : 4096 + 256].view(torch.float32)
        with pytest.raises(ValueError, match="arena's data"):
            arena.submit([Group([{**placed.runs[0], "exp_avg": front}], placed.grads)])


def test_a_control_area_is_formatted_once() -> None:
    arena = Arena(2, 4096)
    address, nbytes = arena.bytes.data_ptr(), arena.nbytes
    try:
        assert arena.mapped_control().submitted == 0
        with pytest.raises(ValueError, match="made for 2 lanes and 64 runs"):
            _native.Control(address, nbytes, lanes=1, max_runs=MAX_RUNS)
        with pytest.raises(ValueError, match="no room for a control area"):
            _native.Control(address, 4096, lanes=2, max_runs=MAX_RUNS)
        with pytest.raises(ValueError, match="a lane"):
            _native.Control(address, nbytes, lanes=0, max_runs=MAX_RUNS)
        arena.bytes[8] = 77
        with pytest.raises(ValueError, match="another version"):
            arena.mapped_control()
    finally:
        arena.close()
    assert _native.control_nbytes(2, MAX_RUNS) % 4096 == 0
