"""What ranks that wait for all ranks record in the store: how many such calls they have entered.

[Note: who has not come]
A backend's collective does not say whom it waits for. So a rank that has waited a second records in the store that
the process group was made with how many such calls it has entered; those that have not recorded as many are the ones
that are missing. One that waits a second for a message adds a half to its mark meanwhile: it keeps no other waiting.
The first rank to ask reads that for all. Nothing is written, nor read, within that second. Of a rank in this host the
kernel knows whether it is stopped or has ended, also where a fork of it keeps its connections open.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..system.waiting import until
from .store_keys import missing, values

# How long a rank may take to read what all ranks have recorded.
_REPORT_S = 1.0
# What the mark of a rank is more while it waits for a message.
AWAITS_MESSAGE = 0.5


def awaits_message(mark: float) -> bool:
    """Return whether a rank with this mark waits for a message."""
    return mark % 1 == AWAITS_MESSAGE


class CallMarks:
    """The marks of all ranks in one store, as one rank records and reads them."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def put(self, entered: float) -> None:
        """Record how many calls this rank has entered."""
        self._store.set(f"at/{self._rank}", str(entered))

    def read(self, entered: int) -> dict[int, float]:
        """Return the mark of each other rank, -1 for none. The first rank that asks in a call reads all for the others.

        They read those of the ranks again that had not come then: a rank that has come stays so.

        Args:
            entered: how many calls this rank has entered.
        """
        report, others = f"marks/{entered}", [rank for rank in range(self._world_size) if rank != self._rank]
        first = int(self._store.compare_set(f"{report}/reader", "", str(self._rank))) == self._rank
        if not first and until(lambda: bool(self._store.check([report])), _REPORT_S):
            marks = dict(enumerate(json.loads(self._store.get(report))))
            late = [rank for rank in others if marks[rank] < entered]
            return {rank: marks[rank] for rank in others} | self._of(late)
        found = self._of(others)
        if first:
            self._store.set(report, json.dumps([found.get(rank, entered) for rank in range(self._world_size)]))
        return found

    def _of(self, ranks: Sequence[int]) -> dict[int, float]:
        keys = {f"at/{rank}": rank for rank in ranks}
        absent = missing(self._store.check, [*keys])
        there = [key for key in keys if key not in absent]
        marks = zip(there, values(self._store, there) if there else [], strict=True)
        return {keys[key]: float(mark) for key, mark in marks} | {keys[key]: -1 for key in absent}
