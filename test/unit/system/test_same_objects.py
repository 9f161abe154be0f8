"""Objects that are remembered by identity."""

from __future__ import annotations

from typing import Any

import pytest

from zero_opt.system.same_objects import SameObjects

FIRST, SECOND = [1], [2]


@pytest.mark.parametrize("others", [[], [FIRST], [SECOND, FIRST], [FIRST, [2]], [FIRST, SECOND, SECOND]])
def test_equal_is_not_the_same(others: list[Any]) -> None:
    known = SameObjects()
    known.note(iter([FIRST, SECOND]))
    assert known.are([FIRST, SECOND])
    assert not known.are(others)


def test_nothing_is_known_at_first_and_once_forgotten() -> None:
    known = SameObjects()
    assert not known.are([])
    known.note([])
    assert known.are([])
    known.forget()
    assert not known.are([])
