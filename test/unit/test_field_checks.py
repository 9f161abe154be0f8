"""What single values may be; the messages of refusals are tested with the policies that have the fields."""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from zero_opt.field_checks import plain_number, waited_for


def test_nobody_waits_longer_than_the_system_counts() -> None:
    assert [waited_for(seconds) for seconds in (0.001, 30, 1e6)] == [0.001, 30, 1e6]
    for seconds in (2147483.648, 1e12, 10**300):
        assert round(waited_for(seconds) * 1000) < 2**31
        assert waited_for(seconds) < threading.TIMEOUT_MAX


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int8(100), 100),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float32(0.5), 0.5),
        (np.float64(3), 3.0),
        (Fraction(1, 4), 0.25),
        (Fraction(10**400), math.inf),
        (3, 3),
        (True, True),
        ("3", "3"),
        (None, None),
    ],
)
def test_other_numbers_become_pythons_own(value: Any, plain: Any) -> None:
    found = plain_number(value)
    assert found == plain and type(found) is type(plain)
