"""The group through which ranks ask each other for state, beside training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from .groups import Group
from .peer_watch import Watch
from .stops import Stops
from .waits_beside import looked_beside

# What a rank waits for that asks for state, or is asked.
_ASKS = "this rank waits for its message"


class SideGroup(Group):
    """A group for messages between two ranks, beside all collectives.

    Attributes:
        beside: the watch of the ranks in training, which knows which of them are stopped.
    """

    beside: Watch | None = None

    def _at_once(self) -> set[int]:
        """Return the neighbors in [Note: the ring]."""
        return {(self.rank + away) % self.world_size for away in (-1, 1)}

    def lookout(self, only: int | None = None) -> Callable[[], None]:
        """Return what :meth:`Group.lookout` does; ``only``: the rank that is waited for, if not all are."""
        return (lambda: None) if self.beside is None else self.broken.lookout(Stops(self.beside, _ASKS, only).look)

    def looking(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which another thread than the main one waits for a rank, which may stop or be killed."""
        return looked_beside(self.lookout(rank), self.interrupt)

    @property
    def inherited(self) -> bool:
        """Whether this is a fork of the process that made the group, which cannot use it."""
        return os.getpid() != self._pid
