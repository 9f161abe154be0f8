"""What a step does when a reduced gradient has an inf or NaN on any rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..errors import NonFiniteGradient
from ..policies import Checks
from .grad_norm import Measured


class NonFinite(Protocol):
    """One of ``Checks(nonfinite=...)``."""

    def skips(self, measure: Callable[[], Measured]) -> bool:
        """Whether the step is not to be taken; the same on every rank.

        Args:
            measure: looks at the gradients of all ranks. Collective.

        Raises:
            NonFiniteGradient: on every rank.
        """


class Ignored:
    """``"ignore"``: whatever they are, they are stepped with."""

    def skips(self, measure: Callable[[], Measured]) -> bool:  # noqa: ARG002  (see NonFinite)
        return False


class Raised:
    """``"raise"``."""

    def __init__(self, describe: Callable[[int], str]) -> None:
        self._describe = describe

    def skips(self, measure: Callable[[], Measured]) -> bool:
        found = measure().nonfinite
        if found is None:
            return False
        rank, param = found
        raise NonFiniteGradient(
            f"the mean gradient of {self._describe(param)} has an inf or NaN in the part that rank {rank} owns; "
            "parameters and state are untouched: call zero_grad() on every rank and go on, or use "
            'Checks(nonfinite="skip")',
            rank=rank,
            param=param,
        )


class Skipped:
    """``"skip"``."""

    def skips(self, measure: Callable[[], Measured]) -> bool:
        return measure().nonfinite is not None


def build_nonfinite(checks: Checks, describe: Callable[[int], str]) -> NonFinite:
    """What ``checks`` asks for.

    Args:
        describe: names a parameter, given its global index.
    """
    if checks.nonfinite == "raise":
        return Raised(describe)
    return Skipped() if checks.nonfinite == "skip" else Ignored()
