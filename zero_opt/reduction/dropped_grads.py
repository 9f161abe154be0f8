"""Gradients that were dropped or zeroed although they are part of a sum: what all ranks must have done alike.

A gradient that has left for its shard cannot be taken out of the mean. Its owner can only begin the sum anew, from a
round on that is the same one on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from functools import reduce
from operator import or_
from typing import NamedTuple

from ..comm.agreement import StepAgreement
from ..errors import GradientConflict
from ..layout import indices_of
from .interface import ReductionParts

_INSTEAD = "call opt.zero_grad() on every rank instead of model.zero_grad()"
_OR_AT_STEP = f"{_INSTEAD}, or use reduction=zero_opt.AtStep(), which reduces what there is at step()"


class OwnSums(dict[int, int]):
    """By parameter, the first round in which this rank's gradient went into the sum.

    Rounds count from 1 when the ranks last agreed; 0 is all that was summed before. ``_restarts`` has the last round
    before the parameter was dropped or zeroed.
    """

    add = dict.setdefault  # a parameter's gradient has gone into a round

    def __init__(self) -> None:
        super().__init__()
        self._restarts: dict[int, int] = {}

    def restart(self, params: Iterable[int], rounds: int) -> None:
        """Note what was dropped or zeroed, when there had been so many rounds."""
        for param in params:
            if self.pop(param, None) is not None or param in self._restarts:
                self._restarts[param] = rounds

    def agreed(self, params: Collection[int]) -> None:
        """Note that the shards hold gradients of these, and no others."""
        zero_rounds = dict.fromkeys(params, 0)
        self.clear()
        self.update(zero_rounds)

    def forget_rounds(self) -> None:
        """Begin to count rounds."""
        self._restarts.clear()
        self.agreed(self)

    @property
    def restarted(self) -> Collection[int]:
        """The parameters that were dropped or zeroed, though part of a sum."""
        return self._restarts.keys()

    def told(self, params: Collection[int]) -> Told:
        """Return what another rank must know of these parameters."""
        # What was dropped within a round, before the parameter's own gradient came, leaves that round in the sum.
        voided = {
            param: min(rounds, self.get(param, rounds + 1) - 1)
            for param, rounds in self._restarts.items()
            if param in params
        }
        return Told(voided, {param: rounds for param, rounds in self.items() if param in params})


class Told(NamedTuple):
    """What a rank tells of sums, by parameter.

    Attributes:
        voided: the last round that it wants out of the sum. first: the first round that it has in the sum.
    """

    voided: Mapping[int, int]
    first: Mapping[int, int]


def require_same_restarts(agreed: StepAgreement, mine: OwnSums, parts: ReductionParts) -> None:
    """Refuse a gradient that some ranks have dropped or zeroed, unless the sum can begin anew on all. Collective.

    It cannot where another rank keeps what the sum has of it, where the parameter's owner has had no gradient and so
    could not know, and where the ranks have had unequal numbers of rounds, so that nobody knows which of them count.

    Raises:
        GradientConflict: on every rank.
    """
    restarted = [report.restarted & agreed.used for report in agreed.reports]
    rounds = {report.rounds for report in agreed.reports if not report.absent}
    if not any(restarted):
        return
    doubtful = indices_of(reduce(or_, restarted))
    pairs = json.dumps([[*part.items()] for part in mine.told(doubtful)]).encode()
    told = [Told(*map(dict, json.loads(raw))) for raw in parts.agreement.group.all_gather_bytes(pairs)]
    if len(rounds) > 1 and any(any(rank.voided.values()) for rank in told):
        raise GradientConflict(
            "p.grad was dropped or zeroed between two backwards of one step, of which the ranks have had unequal "
            f"numbers; {_INSTEAD}"
        )
    owners: dict[int, list[int]] = {param: [] for param in doubtful}
    for bucket in parts.partition.buckets if doubtful else ():
        for owner in range(len(told)):
            for param in doubtful.intersection(piece.param for piece in bucket.layout.slices(owner)):
                owners[param].append(owner)
    for param in sorted(doubtful):
        conflict = _conflict(param, told, owners[param])
        if conflict is not None:
            raise GradientConflict(f"{parts.partition.flats[param].label}: p.grad was dropped or zeroed {conflict}")


def _conflict(param: int, told: Collection[Told], owners: Iterable[int]) -> str | None:
    """Return why one parameter's sum cannot begin anew, if it cannot."""
    voided = {rank: known.voided[param] for rank, known in enumerate(told) if param in known.voided}
    first = {rank: known.first[param] for rank, known in enumerate(told) if param in known.first}
    for rank, last in voided.items():
        for other in (other for other, begun in first.items() if begun <= last):
            return (
                f"on rank {rank}, and not on rank {other}, so what backwards have added to it is in the mean of all "
                f"ranks; {_OR_AT_STEP}"
            )
    rank, latest = max(voided.items(), key=lambda item: item[1])
    for owner in owners if latest else ():
        if voided.get(owner) != latest:
            return (
                f"on rank {rank}, while on rank {owner} it has had none yet: the sum of it there cannot begin anew; "
                f"{_OR_AT_STEP}"
            )
    return None
