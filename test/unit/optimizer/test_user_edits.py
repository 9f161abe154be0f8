"""When values that all ranks have written to equally often are compared."""

from __future__ import annotations

from zero_opt.optimizer.user_edits import UserEdits


def _compared(edits: UserEdits, *params: int) -> list[int]:
    """What is compared of parameters whose values are equal."""
    due = edits.due(params)
    edits.accept(params)
    return due


def test_values_are_compared_ever_more_seldom() -> None:
    edits = UserEdits()
    assert [step for step in range(1, 40) if _compared(edits, 3)] == [1, 2, 4, 8, 16, 32]


def test_each_parameter_counts_by_itself() -> None:
    edits = UserEdits()
    for _ in range(3):
        _compared(edits, 0)
    assert _compared(edits, 0, 1) == [0, 1]
    assert _compared(edits, 0, 1) == [1]
    assert _compared(edits) == []


def test_uneven_writes_are_compared_every_time_and_hide_no_even_ones() -> None:
    edits, counts = UserEdits(), {0: [1, 0], 1: [2, 2], 2: [1, 1]}
    edits.accept([0, 2, 2])
    assert edits.to_compare(counts) == {0: [1, 0], 1: [2, 2]}
    edits.accept(counts)
    assert edits.to_compare(counts) == counts
    edits.accept(counts)
    assert edits.to_compare(counts) == {0: [1, 0]}


def test_values_that_differ_are_compared_again() -> None:
    edits = UserEdits()
    assert edits.due([0]) == edits.due([0]) == _compared(edits, 0) == [0]
