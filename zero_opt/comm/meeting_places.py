"""Where ranks of a group meet in the store: a place for each of their meetings, in order."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .store import default_store

# What names a group on all of its ranks: its name, and its global ranks.
Key = tuple[str, tuple[int, ...]]
# Keys there: a rank's error; how many ranks have come, or have read what all said; what a rank says on coming.
FAILED, COUNT, CAME = "failed", "count", "came"


def meeting_place(key: Key, number: int) -> Any:
    """Return the part of the store in which the ranks of a group meet for the n-th time."""
    digest = hashlib.sha256(json.dumps([key, number]).encode()).hexdigest()[:32]
    return default_store(f"zero_opt/meeting/{digest}")


def next_open(key: Key, number: int, rank: int) -> tuple[int, bool]:
    """Return the number of the next meeting in which no rank has left an error, and whether ranks wait for this one.

    Where this rank has come already, it was in an earlier process group, and the others may have come in that one, too.
    """
    while True:
        number += 1
        place = meeting_place(key, number)
        if not place.check([FAILED]):
            return number, place.add(COUNT, 0) > 0 and not place.check([f"{CAME}/{rank}"])


def where_ranks_wait() -> Any:
    """Return the part of the store in which ranks say, by their global rank, where they wait."""
    return default_store("zero_opt/at")
