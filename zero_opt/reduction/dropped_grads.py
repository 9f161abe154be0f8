"""Gradients that were dropped or zeroed although they are part of a sum: what all ranks must have done alike.

A gradient that has left for its shard cannot be taken out of the mean. Its owner can only begin the sum anew, from a
round on that is the same one on every rank.
"""

from __future__ import annotations

import json
from functools import reduce
from itertools import product
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
    told = [Restarts(*json.loads(raw)) for raw in parts.agreement.group.all_gather_bytes(json.dumps(mine).encode())]
    late = reduce(or_, (rank.late for rank in told)) & agreed.used
    if late and len(rounds) > 1:
        raise GradientConflict(
            "p.grad was dropped or zeroed between two backwards of one step, of which the ranks have had unequal "
            f"numbers; {_INSTEAD}"
        )
    used_by = [report.used for report in agreed.reports]
    for (rank, mask), (other, known) in product(enumerate(restarted), enumerate(told)):
        # A gradient of the last round alone counts as kept where the rank that has dropped it has had no newer one.
        kept = mask & (known.kept | (used_by[other] & ~restarted[other] & ~used_by[rank]))
        if kept:
            label = parts.partition.flats[(kept & -kept).bit_length() - 1].label
            raise GradientConflict(
                f"{label}: p.grad was dropped or zeroed on rank {rank}, and not on rank {other}, so what backwards "
                f"have added to it is in the mean of all ranks; {_INSTEAD}, or use reduction=zero_opt.AtStep(), which "
                "reduces what there is at step()"
            )
    for bucket in parts.partition.buckets:
        for owner, mask in enumerate(restarted):
            for piece in bucket.layout.slices(owner):
                if (late & ~mask) >> piece.param & 1:
                    raise GradientConflict(
                        f"{parts.partition.flats[piece.param].label}: p.grad was dropped or zeroed between two "
                        f"backwards of one step on some ranks, while on rank {owner} it has had none yet; {_INSTEAD}"
                    )
