"""Gradients that were dropped or zeroed between two backwards of one step: what all ranks must have done alike.

A gradient that has left for its shard cannot be taken out of the mean. Its owner can only begin the sum anew, from a
round on that is the same one on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

from ..comm.agreement import StepAgreement
from ..errors import GradientConflict
from ..sharding.partition import Partition


def require_same_restarts(agreed: StepAgreement, partition: Partition) -> None:
    """Refuse a gradient that was dropped where its parameter is used, if its owner, not using it, could not know.

    Nor can an owner know which of the rounds before count where the ranks have had unequal numbers of them.

    Raises:
        GradientConflict: on every rank.
    """
    restarted = [report.restarted & agreed.used for report in agreed.reports]
    if not any(restarted):
        return
    _require_same_drops(restarted, [report.used for report in agreed.reports], partition)
    if len({report.rounds for report in agreed.reports if not report.absent}) > 1:
        raise GradientConflict(
            "p.grad was dropped or zeroed between two backwards of one step, of which the ranks have had unequal "
            "numbers; call opt.zero_grad() instead of model.zero_grad()"
        )
    anywhere = reduce(or_, restarted)
    for bucket in partition.buckets:
        for owner, mask in enumerate(restarted):
            for piece in bucket.layout.slices(owner):
                if (anywhere & ~mask) >> piece.param & 1:
                    raise GradientConflict(
                        f"{partition.flats[piece.param].label}: p.grad was dropped or zeroed between two backwards of "
                        f"one step on some ranks, while on rank {owner} it has had none yet; call opt.zero_grad() "
                        "instead of model.zero_grad()"
                    )


def _require_same_drops(restarted: Sequence[int], used_by: Sequence[int], partition: Partition) -> None:
    """Refuse a gradient that one rank has dropped since its backward, and another has not: it is in the mean."""
    kept_by = [used & ~mask for used, mask in zip(used_by, restarted, strict=True)]
    kept = reduce(or_, kept_by)
    for rank, mask in enumerate(restarted):
        dropped = mask & ~used_by[rank] & kept
        if dropped:
            index = (dropped & -dropped).bit_length() - 1
            other = next(other for other, held in enumerate(kept_by) if held >> index & 1)
            raise GradientConflict(
                f"{partition.flats[index].label}: p.grad was dropped on rank {rank} after its backward, and not on "
                f"rank {other}, so it is in the mean of all ranks; drop it on every rank with opt.zero_grad(), or use "
                "reduction=zero_opt.AtStep(), which reduces what there is at step()"
            )
