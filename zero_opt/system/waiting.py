"""Waits for what can only be asked for again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

# Intervals grow from the first to the second of these, in seconds.
_FIRST_PAUSE_S, _PAUSE_S = 0.0002, 0.1
# An interval is so many times as long as asking took, so that what many ask has time to answer, up to the second.
_TIMES_ASKING, _LONGEST_S = 4.0, 1.0


def until(
    done: Callable[[], bool],
    patience_s: float,
    look: Callable[[float], None] = lambda _: None,
    longest_pause_s: float = 0.0,
) -> bool:
    """Call ``done`` until it returns True, at growing intervals; returns False after ``patience_s`` seconds.

    Args:
        look: called before each interval, with the seconds since the beginning; may raise.
        longest_pause_s: the longest interval, if that is longer than usual.
    """
    begun, pause_s = time.monotonic(), _FIRST_PAUSE_S
    asked = begun
    while not done():
        waited = time.monotonic() - begun
        look(waited)
        if waited > patience_s:
            return False
        asking_s = min(_TIMES_ASKING * (time.monotonic() - asked), _LONGEST_S)
        time.sleep(max(pause_s, asking_s))
        pause_s = min(1.5 * pause_s, max(_PAUSE_S, longest_pause_s))
        asked = time.monotonic()
    return True
