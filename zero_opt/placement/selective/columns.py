"""Columns of a parameter in a slice of it: where their elements lie, and their sums of squares.

Columns are slices along the last dimension. In storage order they recur: a few neighboring elements of one column,
then of the next, and a row is complete once each has had its turn. A slice of a parameter begins and ends anywhere.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...layout import ParamSlice
from ...sharding.flat_param import FlatParam

# Elements widened to fp64 at a time.
_SQUARED_NUMEL = 1 << 18


def is_matrix(shape: torch.Size) -> bool:
    """Whether a parameter of this shape has columns that are tensors."""
    return len(shape) >= 2 and shape.numel() > 0


def columns_of(shape: torch.Size) -> int:
    """How many columns a parameter of this shape has; what is no matrix is one."""
    return shape[-1] if is_matrix(shape) else 1


def _row(flat: FlatParam) -> tuple[int, int]:
    """How many columns a row has, and how many elements of one follow each other in it."""
    total = columns_of(flat.shape)
    return total, flat.strides[-1] if total > 1 else max(flat.numel, 1)


def places_of(chosen: Tensor, piece: ParamSlice, flat: FlatParam) -> Tensor:
    """Where in a slice the elements of some columns lie, ascending, on the parameter's device."""
    (start, stop), (total, inner) = piece.in_param, _row(flat)
    width, numbers = total * inner, partial(torch.arange, dtype=torch.int64, device="cpu")
    in_row = (chosen[:, None] * inner + numbers(inner)).view(-1)
    rows = numbers(start // width, -(-stop // width)) * width
    in_param = (rows[:, None] + in_row).view(-1)
    first, last = torch.searchsorted(in_param, torch.tensor([start, stop], dtype=torch.int64, device="cpu")).tolist()
    return (in_param[first:last] - start).to(flat.param.device)


def square_sums(run: Tensor, piece: ParamSlice, flat: FlatParam) -> Tensor:
    """Per column of a parameter, the sum of squares of its elements in a slice, fp64, in host memory."""
    total, inner = _row(flat)
    sums = torch.zeros(total, dtype=torch.float64, device=run.device)
    rows = max(_SQUARED_NUMEL // (total * inner), 1)
    lead = piece.in_param.start % inner  # every part begins where the slice does, in the same column
    first = piece.in_param.start // inner % total
    for part in torch.split(run, rows * total * inner):
        squares = part.double().square()
        if inner > 1:
            squares = pad(squares, (lead, -(lead + part.numel()) % inner)).view(-1, inner).sum(1)
        sums += pad(squares, (first, -(first + squares.numel()) % total)).view(-1, total).sum(0)
    return sums.cpu()
