"""Notices when the package unpickles anything: code of its own is on the stack while pickle looks up a class."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "zero_opt") + "/"


class UnpickledByUs(AssertionError):
    """The package unpickles something.

    Raised where pickle looks up the class, so that the load ends, in a forked rank too.
    """


def package_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the package's own code."""
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame


class UnpickleAudit:
    """A ``sys.addaudithook``; ``events`` are the places in the package that pickle was called from."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take note of one event."""
        if event != "pickle.find_class":
            return
        frame = package_frame(sys._getframe(1))
        if frame is None:
            return
        self.events.append(f"{frame.f_code.co_filename}:{frame.f_lineno} unpickles {'.'.join(map(str, arguments))}")
        raise UnpickledByUs(self.events[-1])


# What the tests install.
AUDIT = UnpickleAudit()
