"""What the wires between hosts carry over time, read from the switch while ranks run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType

_EVERY_S = 0.004
_HEIGHTS = " ▁▂▃▄▅▆▇█"


class Wire:
    """Bytes that one host has sent and received, sampled in the background for as long as the context lasts.

    Args:
        carried: the two numbers as they are now.
    """

    def __init__(self, carried: Callable[[], tuple[int, int]]) -> None:
        self._carried = carried
        self._samples: list[tuple[float, int, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Wire:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._samples.append((time.monotonic(), *self._carried()))

    def use(self, began: float, ended: float, every: float, rate: float) -> list[list[float]]:
        """Of each direction, which part of so many bits per second was used in each of the equal times in between."""
        count = max(1, round((ended - began) / every))
        marks = [began + number * every for number in range(count + 1)]
        rows = []
        for direction in (1, 2):
            totals = [self._at(mark, direction) for mark in marks]
            rows.append([8 * (b - a) / every / rate for a, b in pairwise(totals)])
        return rows

    def _at(self, moment: float, direction: int) -> float:
        """A total at a moment between two samples."""
        before, after = self._samples[0], self._samples[-1]
        for sample in self._samples:
            if sample[0] > moment:
                after = sample
                break
            before = sample
        share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        return before[direction] + min(1.0, share) * (after[direction] - before[direction])


def bars(shares: Sequence[float]) -> str:
    """A character per share of one, as high as the share."""
    top = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[min(top, max(0, round(top * share)))] for share in shares)
