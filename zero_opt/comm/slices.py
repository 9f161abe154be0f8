"""Waits for collectives in slices, between which Python sees Ctrl-C."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..system.interrupts import by_handler

# Python sees Ctrl-C this often.
SLICE_S = 0.05


def done_within(work: Any, seconds: float) -> bool:
    """Wait for a collective of CPU tensors for so long at the most; whether it is over. Raises the backend's error."""
    try:
        work.wait(timedelta(seconds=seconds))
        return True
    except RuntimeError as error:
        if by_handler(error):
            raise
        if not work.is_completed():
            return False
    work.wait()  # over since: raises where it has failed
    return True
