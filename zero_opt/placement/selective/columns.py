"""Columns of a parameter in a slice of it: where they lie, how they get out of it and back, their sums of squares.

Columns are slices along the last dimension. In storage order they recur: a few neighboring elements of one column,
then of the next, and a row is complete once each has had its turn. A slice of a parameter begins and ends anywhere, so
its first and last row may be incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...layout import ParamSlice
from ...sharding.flat_param import FlatParam

# Elements widened to fp64 at a time.
_SQUARED_NUMEL = 1 << 18


def is_matrix(param: Tensor) -> bool:
    """Whether a parameter has columns that are tensors."""
    return param.dim() >= 2 and param.numel() > 0


class _Rows(NamedTuple):
    """Neighboring rows of a slice, all complete or one that is not.

    Attributes:
        where: they lie in the slice. height: how many. first, last: the elements of a row that they have.
    """

    where: slice
    height: int
    first: int
    last: int

    def of(self, run: Tensor) -> Tensor:
        """These rows of a slice, one per row."""
        return run[self.where].view(self.height, -1)


def neighbors_in_column(flat: FlatParam) -> int:
    """How many elements of a column follow each other in a row."""
    return flat.strides[-1] if flat.shape[-1] > 1 else 1


def _rows(piece: ParamSlice, flat: FlatParam) -> Iterator[_Rows]:
    (start, stop), numel = piece.in_param, flat.shape[-1] * neighbors_in_column(flat)
    complete = {-(-start // numel) * numel, stop // numel * numel}
    cuts = sorted({start, *(cut for cut in complete if start < cut < stop), stop})
    for begin, end in pairwise(cuts):
        count = max((end - begin) // numel, 1)
        first = begin % numel
        yield _Rows(slice(begin - start, end - start), count, first, first + (end - begin) // count)


class Columns:
    """The elements of some columns that a slice has.

    Attributes:
        chosen: the columns' numbers, ascending. numel: how many elements they have in the slice.
    """

    def __init__(self, piece: ParamSlice, flat: FlatParam, chosen: Tensor) -> None:
        self.chosen, inner, device = chosen, neighbors_in_column(flat), flat.param.device
        self._parts: list[tuple[_Rows, Tensor]] = []  # and the elements of each row
        for rows in _rows(piece, flat):
            here = chosen[(chosen >= rows.first // inner) & (chosen * inner < rows.last)]
            elements = (here[:, None] * inner + torch.arange(inner, dtype=torch.int64, device="cpu")).view(-1)
            elements = elements[(elements >= rows.first) & (elements < rows.last)] - rows.first
            self._parts.append((rows, elements.to(device)))
        self.numel = sum(rows.height * elements.numel() for rows, elements in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers that are kept."""
        return self.chosen.nbytes + sum(elements.nbytes for _, elements in self._parts)

    def take(self, run: Tensor) -> Tensor:
        """The elements out of a slice, 1-D, which is given in storage order, as they come to be."""
        where = self._where(run.device)
        taken = [rows.of(run).gather(1, there).view(-1) for (rows, _), there in zip(self._parts, where, strict=True)]
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def put(self, run: Tensor, values: Tensor) -> None:
        """Write the elements into a slice, rounded to its dtype; the reverse of :meth:`take`."""
        where = self._where(run.device)
        parts = torch.split(values.to(run.device, run.dtype), [there.numel() for there in where])
        for (rows, _), there, part in zip(self._parts, where, parts, strict=True):
            rows.of(run).scatter_(1, there, part.view(there.shape))

    def _where(self, device: torch.device) -> list[Tensor]:
        return [elements.to(device).expand(rows.height, -1) for rows, elements in self._parts]


def square_sums(run: Tensor, piece: ParamSlice, flat: FlatParam) -> Tensor:
    """Per column of a parameter, the sum of squares of its elements in a slice, fp64, in host memory."""
    inner = neighbors_in_column(flat)
    sums = torch.zeros(flat.shape[-1], dtype=torch.float64, device=run.device)
    for rows in _rows(piece, flat):
        incomplete = rows.first % inner, -rows.last % inner
        here = slice(rows.first // inner, -(-rows.last // inner))
        for part in torch.split(rows.of(run), max(_SQUARED_NUMEL // (rows.last - rows.first), 1)):
            squares = pad(part.double().square_(), incomplete)
            sums[here] += squares.view(part.shape[0], -1, inner).sum((0, 2))
    return sums.cpu()
