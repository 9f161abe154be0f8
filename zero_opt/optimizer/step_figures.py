"""What the last step took, waited for and moved: the figures of ``ShardedOptimizer.stats()``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from ..system.phases import Seconds

# What step() can spend its time on; see ShardedOptimizer.stats().
_PHASES = ("agreement", "reduction", "norm", "update", "worker", "disk", "gather", "params", "other")


class StepFigures:
    """Figures of the last step.

    Attributes:
        seconds: those that the user's thread spends in calls that make up a step.
    """

    def __init__(self) -> None:
        self.seconds = Seconds()
        self._clip: tuple[Tensor, float] | None = None
        self._before = (0.0, 0)
        self._last: dict[str, float] = {}

    def note_clip(self, norm: Tensor, factor: float) -> None:
        """Note the norm of the step's gradients, and by what they are multiplied."""
        self._clip = norm, factor

    def call(self) -> AbstractContextManager[None]:
        """Return a context of a call that is a part of a step."""
        return self.seconds.counted("other")

    def end_step(self, busy_s: float, sent_nbytes: int, placement: Mapping[str, float]) -> None:
        """Set the figures of a step, which ends now.

        Args:
            busy_s: how long the exchange thread has been busy so far. sent_nbytes: what was sent so far.
            placement: the figures of the placement.
        """
        taken = self.seconds.take()
        exposed = {phase: taken.get(phase, 0.0) for phase in _PHASES}
        (busy_before, sent_before), self._before = self._before, (busy_s, sent_nbytes)
        waited_s = exposed["reduction"] + exposed["params"]  # for that thread
        found = {f"exposed/{phase}_s": seconds for phase, seconds in exposed.items()}
        found["exposed/total_s"] = sum(exposed.values())
        found["hidden/exchange_s"] = max(busy_s - busy_before - waited_s, 0.0)
        if "worker/step_s" in placement:
            found["hidden/worker_s"] = max(placement["worker/step_s"] - exposed["worker"], 0.0)
        found["sent_bytes"] = float(sent_nbytes - sent_before)
        if self._clip is not None:
            found["grad_norm"], found["clip_factor"] = float(self._clip[0]), self._clip[1]
            self._clip = None
        self._last = {**found, **placement}

    def last(self) -> dict[str, float]:
        """Return the figures of the last step; none before the first."""
        return dict(self._last)
