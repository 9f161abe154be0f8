"""One bucket's matrices by columns: some with their state on the device, all others where a placement has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.adam_state import follow_param, new_state
from ...layout import ParamSlice, plan_flat
from ...policies import AdamState
from ...sharding.buckets import GradBucket
from ...sharding.flat_param import FlatParam, own_writes
from ...system.readable_pages import require_readable, require_writable
from ..interface import ParamState
from ..masters import FollowedParams, Stretch, slices_of
from .columns import Columns


def is_matrix(param: Tensor) -> bool:
    """Whether a parameter has columns, slices along its last dimension, that are tensors."""
    return param.dim() >= 2 and param.numel() > 0


def columns_of(piece: ParamSlice, flat: FlatParam) -> Columns:
    """The columns that a slice of a matrix has a part of."""
    return Columns(flat.param.shape, flat.strides, piece.in_param)


def home_bucket(bucket: GradBucket, members: Sequence[int], device: str) -> GradBucket:
    """The parameters that a placement is given for these slices of a bucket, zeros, as a bucket of one rank.

    Args:
        device: "cpu"; or "meta", to see what it would take, of a bucket that is called one in host memory all the same.
    """
    pieces, flats = slices_of(bucket, members)
    homes, specs = [], {}
    for piece, flat in zip(pieces, flats, strict=True):
        numel = columns_of(piece, flat).numel
        home = FlatParam(torch.zeros(numel, dtype=flat.param.dtype, device=device), flat.label)
        homes.append(home)
        specs[piece.param] = home.spec(bucket.layout.group)._replace(device="cpu")
    (layout,) = plan_flat(specs, 1, math.inf, bucket.layout.index)
    assert layout.params == tuple(specs), "a rank's slices of any bucket are in the order of a plan"
    return GradBucket(layout, homes, 0, torch.float32)


class ColumnSlice:
    """One slice of a matrix: which columns are selected, and what is kept of those and of all.

    Attributes:
        columns: where they lie.
        counts: gradients stepped by, per column of the whole parameter, fp32. chosen: the selected ones of all,
            ascending.
        at_home, selected: those here that are not selected, and those that are, by step count: per count the numbers
            of its columns, ascending, counted from the first one here. These lie together, as a matrix of so many
            columns. Counts move alike on each side, so what is equal when columns are chosen stays so.
        order: all these numbers, as columns lie at home, where the place of the selected ones is a gap.
        selected_state: of the selected columns, in order: the master as "param", and moments; fp32, flat, on the
            parameter's device.
        waiting: the sum of the gradients of a window, (numel,) fp32, in host memory; of selected columns, meaningless.
        gathered: how many gradients are in it.
        stepped: whether there is state.
    """

    def __init__(self, piece: ParamSlice, flat: FlatParam) -> None:
        self.columns = columns_of(piece, flat)
        self.waiting = torch.empty(0, dtype=torch.float32, device="cpu")
        self.forget()

    def forget(self) -> None:
        """Nothing has been stepped, nothing is selected, and nothing waits."""
        self.counts = torch.zeros(self.columns.total, dtype=torch.float32, device="cpu")
        self.gathered, self.stepped = 0, False
        self.selected_state: dict[str, Tensor] = {}
        self.choose(torch.empty(0, dtype=torch.int64, device="cpu"))

    def choose(self, chosen: Tensor) -> None:
        """Select these columns of the whole parameter, and put all columns into order."""
        self.chosen = chosen
        there = torch.zeros(self.columns.total, dtype=torch.bool, device="cpu")
        there[chosen] = True
        here = there[self.columns.first : self.columns.first + self.columns.width]
        sides = [self._by_count(which.nonzero().view(-1)) for which in (~here, here)]
        self.order = torch.cat([which for which, _ in sides])
        blocks = torch.split(self.order, [length for _, lengths in sides for length in lengths])
        self.at_home, self.selected = blocks[: len(sides[0][1])], blocks[len(sides[0][1]) :]

    def _counts_of(self, which: Tensor) -> Tensor:
        return self.counts[which + self.columns.first]

    def _by_count(self, which: Tensor) -> tuple[Tensor, list[int]]:
        """Columns in order, and how many there are of each count."""
        counts, order = torch.sort(self._counts_of(which), stable=True)
        return which[order], torch.unique_consecutive(counts, return_counts=True)[1].tolist()

    @property
    def home_numel(self) -> int:
        """Elements at home before the gap."""
        return sum(which.numel() for which in self.at_home) * self.columns.height

    def stretches(self, blocks: Sequence[Tensor], gradients: int = 1) -> Iterator[Stretch]:
        """``at_home`` or ``selected`` as elements.

        Args:
            gradients: steps that the next one stands for; ``steps`` of what is yielded are in units of so many.
        """
        counts = torch.empty(0, dtype=torch.float32, device="cpu")
        if blocks:
            counts = self._counts_of(torch.stack([which[0] for which in blocks]))
        # The number of the next step is rounded to fp32, from which 1 can be taken exactly: so counting in fp32, as
        # some do, gives what counting in fp64 does.
        done = ((counts.double() + gradients) / gradients).float() - 1
        start = 0
        for which, count in zip(blocks, done.tolist(), strict=True):
            stop = start + which.numel() * self.columns.height
            yield Stretch(start, stop, count)
            start = stop

    def take(self, run: Tensor, blocks: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Blocks of columns out of the slice's elements, one after the other, flat, where those are, or in ``out``."""
        numels = [which.numel() * self.columns.height for which in blocks]
        taken = run.new_empty(sum(numels)) if out is None else out
        for which, part in zip(blocks, torch.split(taken, numels), strict=True):
            self.columns.take(run, which.to(run.device), part)
        return taken

    def put(self, run: Tensor, blocks: Sequence[Tensor], values: Tensor) -> None:
        """Write blocks of columns to the slice's elements."""
        numels = [which.numel() * self.columns.height for which in blocks]
        for which, part in zip(blocks, torch.split(values.to(run.device), numels), strict=True):
            self.columns.put(run, which.to(run.device), part)

    def gather(self, grad: Tensor, grad_scale: float) -> None:
        """Add a gradient, (numel,), to those that wait."""
        if grad_scale != 1:
            term = grad.to(self.waiting.device, torch.float32, copy=True).mul_(grad_scale)
        else:  # what is narrower is widened as it is added
            term = grad.to(self.waiting.device, torch.float32 if grad.dtype is torch.float64 else grad.dtype)
        if not self.waiting.numel():
            self.waiting = torch.empty_like(term, dtype=torch.float32)
        if self.gathered:
            self.waiting.add_(term)
        else:
            self.waiting.copy_(term)
        self.gathered += 1

    def mean(self, out: Tensor) -> None:
        """Of the gradients that wait, those of columns at home, in order, written to fp32 memory of ``home_numel``."""
        self.take(self.waiting, self.at_home, out).div_(self.gathered)

    def count(self, *, selected: bool) -> None:
        """The selected columns, or all others, have been stepped."""
        if selected:
            self.counts[self.chosen] += 1
        else:
            others = torch.ones_like(self.counts, dtype=torch.bool)
            others[self.chosen] = False
            self.counts[others] += self.gathered
            self.gathered = 0
        self.stepped = True


class ColumnShard(FollowedParams):
    """This rank's slices of matrices in a bucket, by columns. They are named by their position.

    To the inner placement they are parameters in host memory, 1-D, with one column after the other.

    Attributes:
        members: positions of the slices among this rank's of the bucket. slices: one each.
        home: the bucket that the placement is given, with the slices at their positions.
    """

    def __init__(self, bucket: GradBucket, members: Sequence[int]) -> None:
        super().__init__(*slices_of(bucket, members))
        self.members = members
        self.slices = [ColumnSlice(piece, flat) for piece, flat in zip(self.pieces, self.flats, strict=True)]
        self.home = home_bucket(bucket, members, "cpu")

    # -- parameters ---------------------------------------------------------------------------------------------------

    def read_params(self) -> None:
        """Let masters follow the parameters that the user has written to."""
        for position in filter(self.to_read, range(len(self.slices))):
            column_slice = self.slices[position]
            self.flats[position].load()
            run = self.param_run(position)
            self._fill(position, self.home.params[position].param, run)
            if column_slice.selected_state:
                follow_param(column_slice.selected_state["param"], column_slice.take(run, column_slice.selected))
            self.follow(position)

    def write_home(self, positions: Sequence[int]) -> None:
        """Bring the columns at home into those parameters that the user has not written to meanwhile."""
        for position in positions:
            if not self.edited(position):
                column_slice = self.slices[position]
                self._write(position, column_slice.at_home, self.home.params[position].param[: column_slice.home_numel])

    def write_selected(self, position: int) -> None:
        """Bring the selected columns into the parameter."""
        column_slice = self.slices[position]
        self._write(position, column_slice.selected, column_slice.selected_state["param"])

    def _write(self, position: int, blocks: Sequence[Tensor], values: Tensor) -> None:
        with own_writes([self.flats[position]]):
            self.slices[position].put(self.param_run(position), blocks, values)
            self.flats[position].store()

    # -- state --------------------------------------------------------------------------------------------------------

    def value(self, position: int, key: str, home: ParamState) -> Tensor:
        """One of "exp_avg", "exp_avg_sq", "max_exp_avg_sq" and "master" of a slice, (numel,) fp32, a copy.

        Args:
            home: the state as the placement has it.

        Raises:
            StorageFailed: the placement has it in a file that cannot be read.
        """
        column_slice = self.slices[position]
        require_readable(home[key])
        at_home, run = home[key], torch.empty(self.pieces[position].in_param.numel, dtype=torch.float32, device="cpu")
        if key == "master":  # the home may not have seen yet what the user has written to the parameter
            at_home = at_home.clone()
            follow_param(at_home, self.home.params[position].param)
        column_slice.put(run, column_slice.at_home, at_home[: column_slice.home_numel])
        if column_slice.selected_state:
            column_slice.put(
                run, column_slice.selected, column_slice.selected_state["param" if key == "master" else key]
            )
        return self.saved_master(position, run) if key == "master" else run

    def select(self, position: int, chosen: Tensor, home: ParamState) -> None:
        """Select other columns; everything moves to its new place. :meth:`read_params` comes before."""
        column_slice = self.slices[position]
        keys = [key for key in home if key != "step"]
        values = {key: self.value(position, key, home) for key in keys}
        column_slice.choose(chosen)
        self.place(position, values, home)

    def place(self, position: int, values: Mapping[str, Tensor], home: ParamState) -> None:
        """Write the state of a slice, (numel,) per key, and its parameter, to where its columns are.

        Raises:
            StorageFailed: the placement has it in a file that cannot be written; nothing was.
        """
        for key in values:
            require_writable(home[key])
        column_slice, run = self.slices[position], self.param_run(position)
        values = {key: value.to(torch.float32) for key, value in values.items()}
        master = values.get("master", run)
        # At home, a parameter that is not what its master rounds to would pass for one that the user has written to.
        self._fill(position, self.home.params[position].param, master.to(run.dtype))
        for key, value in values.items():
            self._fill(position, home[key], value)
        column_slice.selected_state = {}
        if column_slice.selected:
            for key, value in {**values, "master": master}.items():
                selected = column_slice.take(value, column_slice.selected)
                role = "param" if key == "master" else key
                column_slice.selected_state[role] = selected.to(run.device, torch.float32)

    def _fill(self, position: int, home: Tensor, values: Tensor) -> None:
        """Write a slice's elements to where its columns are at home."""
        column_slice = self.slices[position]
        home[: column_slice.home_numel].copy_(column_slice.take(values, column_slice.at_home))

    def blank_state(self, position: int, *, amsgrad: bool) -> dict[str, Any]:
        """A state for a placement to adopt, of zeros, with a master where parameters need one."""
        return new_state(self.home.params[position].param, AdamState(), amsgrad=amsgrad)

    # -- a window -----------------------------------------------------------------------------------------------------

    def means(self, positions: Sequence[int]) -> list[Tensor | None]:
        """The mean gradients of these slices where the home takes them from, one per slice of its bucket."""
        targets, grads = self.home.slice_grads(), list[Tensor | None]([None] * len(self.slices))
        for position in positions:
            column_slice = self.slices[position]
            column_slice.mean(targets[position][: column_slice.home_numel])
            if column_slice.at_home:
                grads[position] = targets[position]
        return grads
