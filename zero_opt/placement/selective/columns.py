"""Columns of a parameter in a slice of it: where they lie in storage order, and how they get out of it and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...layout import Span

# Elements widened to fp64 at a time.
_SQUARED_NUMEL = 1 << 18


class Columns:
    """The columns, slices along the last dimension, that a slice of a dense parameter has a part of.

    In storage order they recur: ``inner`` neighboring elements of one column, then of the next, and a row is complete
    once each has had its turn. A slice begins and ends anywhere, so its first and last row may lack elements; where
    columns are taken out, zeros stand for them.

    Attributes:
        first: number of the first column here. width: how many there are. total: of the whole parameter.
        rows: begun or complete. inner: see above.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], span: Span) -> None:
        self.total = shape[-1]
        self.inner = strides[-1] if self.total > 1 else 1
        period = self.total * self.inner
        first_row, last_row = span.start // period, -(-span.stop // period)
        self.rows = last_row - first_row
        self.first, self.width = 0, self.total
        if self.rows == 1:  # columns that it has nothing of take no room
            self.first = span.start % period // self.inner
            self.width = -(-(span.stop - first_row * period) // self.inner) - self.first
        # (row, rows, elements of the slice, elements before them in the row): complete rows together.
        self._parts: list[tuple[int, int, slice, int]] = []
        at = span.start
        while at < span.stop:
            row = at // period
            before = at - row * period - self.first * self.inner
            complete = (span.stop - at) // period if at % period == 0 else 0
            stop = at + complete * period if complete else min((row + 1) * period, span.stop)
            self._parts.append((row - first_row, max(complete, 1), slice(at - span.start, stop - span.start), before))
            at = stop

    @property
    def numel(self) -> int:
        """Elements of all columns here, with the zeros."""
        return self.width * self.rows * self.inner

    @property
    def height(self) -> int:
        """Elements of a column, with the zeros."""
        return self.rows * self.inner

    def _blocks(self, run: Tensor) -> Iterator[tuple[slice, Tensor, slice | None]]:
        """The rows, of shape (rows, width, inner); of an incomplete one a copy, and where its elements belong in it."""
        for row, rows, where, before in self._parts:
            size, part = rows * self.width * self.inner, run[where]
            if part.numel() == size:
                yield slice(row, row + rows), part.view(rows, self.width, self.inner), None
            else:
                padded, inside = run.new_zeros(size), slice(before, before + part.numel())
                padded[inside] = part
                yield slice(row, row + rows), padded.view(1, self.width, self.inner), inside

    def take(self, run: Tensor, which: Tensor, out: Tensor | None = None) -> Tensor:
        """Columns of a slice, side by side as they are in it: moving them is a pass over rows that transposes nothing.

        Args:
            run: the slice, 1-D in storage order. which: numbers of columns, counted from ``first``.
            out: contiguous memory of the result's size and the slice's dtype; made if there is none.

        Returns:
            (rows, columns, inner), contiguous.
        """
        shape = (self.rows, which.numel(), self.inner)
        taken = run.new_empty(shape) if out is None else out.view(shape)
        for rows, block, _ in self._blocks(run):
            if self.inner == 1:  # along the last dimension, torch's gather and scatter are several times as fast
                torch.gather(block[..., 0], 1, which.expand(block.shape[0], -1), out=taken[rows, :, 0])
            else:
                torch.index_select(block, 1, which, out=taken[rows])
        return taken

    def put(self, run: Tensor, which: Tensor, values: Tensor) -> None:
        """Write columns into a slice, rounded to its dtype; the reverse of :meth:`take`."""
        values = values.reshape(self.rows, which.numel(), self.inner)
        for (rows, block, inside), (_, _, where, _) in zip(self._blocks(run), self._parts, strict=True):
            part = values[rows].to(run.dtype)
            if self.inner == 1:
                block[..., 0].scatter_(1, which.expand(block.shape[0], -1), part[..., 0])
            else:
                block.index_copy_(1, which, part)
            if inside is not None:
                run[where] = block.reshape(-1)[inside]

    def square_sums(self, run: Tensor) -> Tensor:
        """Per column, the sum of squares of its elements here, (width,), fp64, in host memory."""
        sums = torch.zeros(self.width, dtype=torch.float64, device=run.device)
        step = max(_SQUARED_NUMEL // (self.width * self.inner), 1)
        for _, block, _ in self._blocks(run):
            for start in range(0, block.shape[0], step):
                sums += block[start : start + step].double().square_().sum((0, 2))
        return sums.cpu()
