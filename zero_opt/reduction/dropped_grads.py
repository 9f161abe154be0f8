"""Gradients that were dropped or zeroed although they are part of a sum: what all ranks must have done alike.

A gradient that has left for its shard cannot be taken out of the mean. Its owner can only begin the sum anew, from a
round on that is the same one on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from ..comm.agreement import StepAgreement
from ..errors import GradientConflict
from .interface import ReductionParts

_INSTEAD = "call opt.zero_grad() on every rank instead of model.zero_grad()"


class Restarts(NamedTuple):
    """What a rank knows of sums, a bit per parameter.

    Attributes:
        kept: earlier rounds are part of the sum, and were not dropped. late: dropped or zeroed after the first round.
    """

    kept: int
    late: int


def require_same_restarts(agreed: StepAgreement, mine: Restarts, parts: ReductionParts) -> None:
    """Refuse a gradient that some ranks have dropped or zeroed, unless the sum can begin anew on all. Collective.

    It cannot where another rank keeps what the sum has of it, where the parameter's owner has had no gradient and so
    could not know, and where the ranks have had unequal numbers of rounds, so that nobody knows which of them count.

    Raises:
        GradientConflict: on every rank.
    """
    restarted = [report.restarted & agreed.used for report in agreed.reports]
    rounds = {report.rounds for report in agreed.reports if not report.absent}
    if not any(restarted) or (len(set(restarted)) == 1 and len(rounds) == 1):
        return
    _require_same_drops(restarted, [report.used for report in agreed.reports], parts)
    told = [Restarts(*json.loads(raw)) for raw in parts.agreement.group.all_gather_bytes(json.dumps(mine).encode())]
    late = reduce(or_, (rank.late for rank in told)) & agreed.used
    if late and len(rounds) > 1:
        raise GradientConflict(
            "p.grad was dropped or zeroed between two backwards of one step, of which the ranks have had unequal "
            f"numbers; {_INSTEAD}"
        )
    for rank, mask in enumerate(restarted):
        for other, known in enumerate(told):
            if mask & known.kept:
                raise GradientConflict(
                    f"{_first(mask & known.kept, parts)}: p.grad was dropped or zeroed on rank {rank}, and not on rank "
                    f"{other}, which keeps what earlier backwards have added to it; {_INSTEAD}"
                )
    for bucket in parts.partition.buckets:
        for owner, mask in enumerate(restarted):
            for piece in bucket.layout.slices(owner):
                if (late & ~mask) >> piece.param & 1:
                    raise GradientConflict(
                        f"{parts.partition.flats[piece.param].label}: p.grad was dropped or zeroed between two "
                        f"backwards of one step on some ranks, while on rank {owner} it has had none yet; {_INSTEAD}"
                    )


def _first(mask: int, parts: ReductionParts) -> str:
    """Return the label of the first parameter in the mask."""
    return parts.partition.flats[(mask & -mask).bit_length() - 1].label


def _require_same_drops(restarted: Sequence[int], used_by: Sequence[int], parts: ReductionParts) -> None:
    """Refuse a gradient that one rank has dropped since its backward, and another has not: it is in the mean."""
    kept_by = [used & ~mask for used, mask in zip(used_by, restarted, strict=True)]
    kept = reduce(or_, kept_by)
    for rank, mask in enumerate(restarted):
        dropped = mask & ~used_by[rank] & kept
        if dropped:
            other = next(other for other, held in enumerate(kept_by) if held & dropped & -dropped)
            raise GradientConflict(
                f"{_first(dropped, parts)}: p.grad was dropped on rank {rank} after its backward, and not on "
                f"rank {other}, so it is in the mean of all ranks; drop it on every rank with opt.zero_grad(), or use "
                "reduction=zero_opt.AtStep(), which reduces what there is at step()"
            )
