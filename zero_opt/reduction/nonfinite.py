"""What a step does when a reduced gradient has an inf or NaN on any rank."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import NonFiniteGradient
from ..policies import Checks


def skips_step(checks: Checks, first: Callable[[], tuple[int, int] | None], describe: Callable[[int], str]) -> bool:
    """Whether ``checks`` has this step left out. The same on every rank.

    Args:
        first: returns the first rank with a non-finite element, and its first parameter with one, as
            :class:`~.grad_norm.Measured` has them; not called with ``nonfinite="ignore"``. May be collective.
        describe: names a parameter, given its global index.

    Raises:
        NonFiniteGradient: on every rank, with ``nonfinite="raise"``.
    """
    if checks.nonfinite == "ignore":
        return False
    nonfinite = first()
    if nonfinite is not None and checks.nonfinite == "raise":
        rank, param = nonfinite
        raise NonFiniteGradient(
            f"the mean gradient of {describe(param)} has an inf or NaN in the part that rank {rank} owns; "
            "parameters and state are untouched: call opt.zero_grad() on every rank and go on, or use "
            'Checks(nonfinite="skip")',
            rank=rank,
            param=param,
        )
    return nonfinite is not None
