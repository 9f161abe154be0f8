"""What ranks say to each other about state and about leaving: each message a few integers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Round the ring; the last goes to the next rank alone.
OPEN, DEPARTED, BROKEN = 0, 1, 2
# What an asking rank says once it has heard all answers.
GO, STOP = 0, 1
# Answers beside those of Verdict: it comes later; there is an error in the listing's place.
LATER, ERROR = 3, 4


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
    """

    code: int
    step: int
    nbytes: int


def words_of(*numbers: int) -> Tensor:
    """The integers as a tensor that can be sent."""
    return torch.tensor(numbers, dtype=torch.int64)
