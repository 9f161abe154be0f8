"""What ranks say to each other about state and about leaving; see the notes of the state service.

Every message but a listing, and the elements themselves, is a few int64 numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Messages round the ring; the last goes to the next rank alone.
OPEN, DEPARTED, BROKEN = 0, 1, 2
# What an asking rank says once it has heard all answers; the number of its pull follows.
GO, STOP = 0, 1
# Answers beside those of Verdict: it comes later; there is an error in the listing's place.
LATER, ERROR = 3, 4
RING_TAG = 1
# Pulls of one rank that have a tag of their own. A tag that comes back may find messages of a pull that was given up:
# so they say which pull they are of.
_PULL_TAGS = 1 << 20


class RingMessage(NamedTuple):
    """From ``origin``, which asks for the state after so many changes, or has heard that a rank has left.

    Attributes:
        pull: number of the request. about, how, steps, calls: the departure.
    """

    kind: int
    origin: int
    pull: int = 0
    changes: int = 0
    about: int = 0
    how: int = 0
    steps: int = 0
    calls: int = 0


class Answer(NamedTuple):
    """To the asking rank.

    Attributes:
        code: a Verdict's value, ``LATER`` or ``ERROR``. nbytes: of the listing, or the error, that follows.
        pull: which one is answered.
    """

    code: int
    step: int
    nbytes: int
    pull: int


def words_of(*numbers: int) -> Tensor:
    """The integers as a tensor that can be sent."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def answer_tag(pull: int) -> int:
    """Of what an asked rank sends; the asking rank's own words have the tag after it."""
    return RING_TAG + 1 + 2 * (pull % _PULL_TAGS)
