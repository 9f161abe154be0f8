"""Parameters that are brought up to date after ``step()`` has returned: whoever else writes them asks first."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Protocol

from torch import Tensor


class BringsLate(Protocol):
    """Who brings them."""

    def bring(self, params: Collection[Tensor]) -> None:
        """Return when all of its own are up to date, if any of these is."""


_all: weakref.WeakSet[BringsLate] = weakref.WeakSet()


def announce(late: BringsLate) -> None:
    """It is asked from here on, as long as it lives."""
    _all.add(late)


def bring(params: Collection[Tensor]) -> None:
    """Return when none of these is about to be written to. Collective, among the ranks that update them."""
    for late in list(_all):
        late.bring(params)
