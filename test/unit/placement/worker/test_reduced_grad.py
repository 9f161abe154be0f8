"""What a reader knows of one shard's gradient between two steps."""

from __future__ import annotations

import pytest

from zero_opt.placement.worker.reduced_grad import ReducedGrad


def _copied() -> ReducedGrad:
    grad = ReducedGrad()
    assert grad.note_round()
    grad.copied = True
    assert grad.in_arena
    return grad


def test_a_write_makes_a_copy_void() -> None:
    grad = _copied()
    writes = grad.writes
    grad.note_write()
    assert not grad.in_arena and grad.writes == writes + 1
    grad.note_round()
    assert not grad.in_arena


def test_a_factor_makes_a_copy_void_until_the_next_round_is_copied() -> None:
    grad = _copied()
    grad.factors.append(0.5)
    assert grad.copied and not grad.in_arena
    grad.note_write()
    grad.note_round()
    grad.copied = True
    assert grad.in_arena


def test_a_step_makes_a_copy_void() -> None:
    grad = _copied()
    grad.end_step()
    assert not grad.in_arena


@pytest.mark.parametrize("factors", [[], [0.5]])
def test_whether_the_last_step_s_gradient_was_multiplied(factors: list[float]) -> None:
    grad = _copied()
    assert not grad.multiplied_before
    grad.factors.extend(factors)
    grad.end_step()
    grad.note_round()
    assert grad.multiplied_before == bool(factors)
    grad.end_step()
    assert not grad.multiplied_before


def test_of_as_many_rounds_as_the_last_step_had_the_last_one_is_expected_to_be_the_last() -> None:
    grad = ReducedGrad()
    assert [grad.note_round() for _ in range(3)] == [True, True, True]
    grad.end_step()
    assert [grad.note_round() for _ in range(4)] == [False, False, True, True]
    grad.end_step()
    grad.end_step()  # no round in this one, which tells nothing
    assert [grad.note_round() for _ in range(2)] == [False, False]
    grad.end_step()
    assert [grad.note_round() for _ in range(2)] == [False, True]
