"""Parameters that the user has changed on some ranks only while a step was pending: each rank keeps what it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..comm.agreement import Agreement
from ..errors import RankMismatch
from ..sharding.flat_param import own_writes
from ..sharding.partition import Partition


def keep_uneven_edits(
    partition: Partition, agreement: Agreement, params: Sequence[Tensor]
) -> tuple[RankMismatch | None, dict[int, Tensor]]:
    """Let such parameters keep on every rank what they have there, although all are about to be gathered. Collective.

    Args:
        params: all of the optimizer, by global index.

    Returns:
        What is wrong if values differ between ranks, and copies of them for :func:`restore`, by global index.
    """
    uneven = agreement.uneven_edits(partition.edits())
    if not uneven:
        return None, {}
    mismatch = None
    try:
        agreement.require_same_values(uneven, params)
    except RankMismatch as error:
        mismatch = error
    partition.count_edit(uneven)  # once more on every rank: the next step sees that they differ still
    kept = {index: partition.flats[index].param for index in uneven} if mismatch else {}
    return mismatch, {index: param.detach().clone() for index, param in kept.items()}


def restore(partition: Partition, kept: Mapping[int, Tensor]) -> None:
    """Give parameters the values of these copies, by global index."""
    flats = [partition.flats[index] for index in kept]
    with own_writes(flats):
        for flat, values in zip(flats, kept.values(), strict=True):
            flat.param.data.copy_(values)
