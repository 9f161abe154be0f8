"""Whether a worker's step hurries, or leaves the caches to the trainer that computes beside it."""

from __future__ import annotations

# A step past the caches takes about one and a half times as long as another.
_ENOUGH, _STILL_ENOUGH = 2.0, 1.2


class Pace:
    """Judges by the last step how the next one is to be made; either way its bits are the same.

    The caches' last level, and the way to memory, are the worker's and the trainer's together. A step that stores past
    the caches leaves the trainer what it computes with, and takes longer: right for a worker that the trainer comes to
    long after it is done, wrong for one that is waited for.

    Attributes:
        past_caches: whether the next step is to store past the caches.
    """

    def __init__(self) -> None:
        self.past_caches = False
        self._begun: float | None = None

    def begin(self, now: float) -> None:
        """Note that a step is submitted.

        Args:
            now: s, of any monotonic clock.
        """
        self._begun = now

    def end(self, asked_for: float, took: float) -> None:
        """Note that the step is done; of several calls for one step the first counts.

        Args:
            asked_for: s, when the trainer came for it. took: s that the worker needed.
        """
        if self._begun is not None:
            times = (asked_for - self._begun) / max(took, 1e-9)
            self.past_caches = times >= (_STILL_ENOUGH if self.past_caches else _ENOUGH)
        self._begun = None
