"""Parameters that users write to between steps: which are compared, and what each rank keeps if a step was pending."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ..comm.agreement import Agreement
from ..errors import RankMismatch
from ..sharding.flat_param import own_writes
from ..sharding.partition import Partition

# By parameter, how often each rank has written to it.
EditCounts = Mapping[int, Sequence[int]]


class UserEdits:
    """Which parameters to compare of those that ranks have written to between two steps.

    The values may differ also where every rank has written equally often, as of noise without a common seed. To compare
    them costs four reads of each, so such a parameter is compared the first time, the second, the fourth, and so on.
    """

    def __init__(self) -> None:
        self._accepted = Counter[int]()

    def due(self, params: Iterable[int]) -> list[int]:
        """Return which of these to compare that every rank has written to equally often; the same on every rank."""
        return [param for param in params if (self._accepted[param] + 1).bit_count() == 1]

    def to_compare(self, counts: EditCounts) -> EditCounts:
        """Return those that are :meth:`due`, and all that ranks have written to unequally often."""
        compared = {*uneven_edits(counts), *self.due(counts)}
        return {param: by_rank for param, by_rank in counts.items() if param in compared}

    def accept(self, params: Iterable[int]) -> None:
        """Count these, whose values are equal as far as they were compared."""
        self._accepted.update([*params])  # of a mapping, values would be added


def uneven_edits(counts: EditCounts) -> EditCounts:
    """Return those parameters that not all ranks have written to equally often."""
    return {param: by_rank for param, by_rank in counts.items() if len(set(by_rank)) > 1}


def keep_uneven_edits(
    partition: Partition, agreement: Agreement, params: Sequence[Tensor]
) -> tuple[RankMismatch | None, dict[int, Tensor]]:
    """Let such parameters keep on every rank what they have there, although all are about to be gathered. Collective.

    Args:
        params: all of the optimizer, by global index.

    Returns:
        What is wrong if values differ between ranks, and copies of them for :func:`restore`, by global index.
    """
    uneven = uneven_edits(agreement.edit_counts(partition.edits()))
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
