"""What single values may be; the messages of refusals are tested with the policies that have the fields."""

from __future__ import annotations

import threading

from zero_opt.field_checks import waited_for


def test_nobody_waits_longer_than_the_system_counts() -> None:
    assert [waited_for(seconds) for seconds in (0.001, 30, 1e6)] == [0.001, 30, 1e6]
    for seconds in (2147483.648, 1e12, 10**300):
        assert round(waited_for(seconds) * 1000) < 2**31
        assert waited_for(seconds) < threading.TIMEOUT_MAX
