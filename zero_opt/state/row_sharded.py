"""State as tensors cut by rows over the ranks, which ``torch.distributed.checkpoint`` loads at any world size.

A shard is a run of memory that ends anywhere; a ``DTensor`` is cut between rows. So every rank is sent its rows when
state is saved, and sends them to the owners of their elements when state is loaded. Rows are those of the outermost
dimension in memory, dimension 0 but for parameters such as a transposed view. So a rank's rows are one run of memory.

:mod:`.full_state` imports this module when it is first needed, because ``torch.distributed.tensor`` takes longer to
import than all else here together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..comm.agreement import Agreement
from ..comm.groups import Group
from ..comm.transfers import TransferQueue
from ..kernels.runs import blocks_of
from ..kernels.strides import contiguous_strides, is_dense
from ..layout import ParamSlice, Span
from ..placement import Placement
from ..sharding.flat_param import FlatParam, element_order
from ..sharding.partition import Partition
from ..system.shared_memory import allocation_errors
from .consolidate import LocalState
from .entries import Batch, Field, listed, listing, message_to_send, packets_apart
from .incoming import RoomForState, uncut_over
from .state_dict import StatesByIndex, cut, torch_dtype


class RowLayout(NamedTuple):
    """A dense tensor's layout: a run of memory that ranks cut by rows. The tensor has an element and a dimension."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def dim(self) -> int:
        """The outermost dimension in memory."""
        sizes = range(len(self.shape))
        return max(sizes, key=lambda dim: (self.shape[dim] != 1, self.strides[dim], -dim))

    def chunk(self, world_size: int) -> int:
        """Return how many elements a rank's rows have; the last ranks may have fewer, or none."""
        rows = self.shape[self.dim]
        return -(-rows // world_size) * (self.numel // rows)

    def run(self, rank: int, world_size: int) -> Span:
        """Return the elements of a rank's rows."""
        chunk = self.chunk(world_size)
        return Span(min(rank * chunk, self.numel), min((rank + 1) * chunk, self.numel))

    def ranks_of(self, span: Span, world_size: int) -> range:
        """Return the ranks that have rows in a span of elements."""
        chunk = self.chunk(world_size)
        return range(span.start // chunk, -(-span.stop // chunk)) if span.numel else range(0)

    def rows(self, run: Tensor) -> Tensor:
        """Return a run of rows as a view that has the tensor's shape, but for the number of rows."""
        shape = list(self.shape)
        shape[self.dim] = run.numel() * shape[self.dim] // self.numel
        return run.as_strided(shape, self.strides, run.storage_offset())

    def wrap(self, run: Tensor, group: Group) -> Tensor:
        """Return this rank's rows as a DTensor over ``group``; at world size 1 as a plain tensor."""
        if group.world_size == 1:
            return self.rows(run)
        shape = torch.Size(self.shape)
        return DTensor.from_local(
            self.rows(run), group.mesh(), [Shard(self.dim)], run_check=False, shape=shape, stride=self.strides
        )


def overlap(first: Span, second: Span) -> Span:
    """Return the elements that two spans have in common, an empty span if there are none."""
    start = max(first.start, second.start)
    return Span(start, max(start, min(first.stop, second.stop)))


def blank(value: Tensor, param: Tensor, shape: torch.Size, group: Group) -> Tensor:
    """Return a place for state of ``param`` of the given shape, cut by rows, full of ``value``'s first element."""
    fill = value.detach().reshape(-1)[:1].cpu()
    if not shape or not shape.numel():
        return fill.expand(shape.numel()).reshape(shape).clone()
    strides = param.stride() if shape == param.shape and is_dense(shape, param.stride()) else contiguous_strides(shape)
    layout = RowLayout(tuple(shape), strides, value.dtype)
    return layout.wrap(fill.repeat(layout.run(group.rank, group.world_size).numel), group)


class IncomingRows(RoomForState):
    """This rank's rows of all ranks' state in host memory, while they come in; small values in full."""

    def __init__(
        self,
        flats: Mapping[int, FlatParam],
        listings: Sequence[Sequence[Batch]],
        uncut: Mapping[str, set[int]],
        group: Group,
    ) -> None:
        super().__init__(flats, listings, uncut)
        self._group = group

    def _new(self, field: Field, indices: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        made = [self._rows(self.layout(index, field)) for index in indices]
        return [run for run, _ in made], [value for _, value in made]

    def _rows(self, layout: RowLayout) -> tuple[Tensor, Tensor]:
        if not layout.numel:
            empty = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
            return empty.view(-1), empty
        numel = layout.run(self._group.rank, self._group.world_size).numel
        run = torch.empty(numel, dtype=layout.dtype, device="cpu")
        return run, layout.wrap(run, self._group)

    def layout(self, index: int, field: Field) -> RowLayout:
        """Return the layout of a value of all ranks."""
        dtype = torch_dtype(field.dtype)
        if field.kind == "tensor":
            return RowLayout(tuple(field.shape), contiguous_strides(torch.Size(field.shape)), dtype)
        flat = self.flats[index]
        if field.kind == "blocks":
            return RowLayout((blocks_of(flat.numel),), (1,), dtype)
        return RowLayout(tuple(flat.shape), flat.strides, dtype)


class ShardedState:
    """One way of all ranks' state between owned slices and rows: out or in. Methods are collective."""

    def __init__(self, agreement: Agreement, partition: Partition, placement: Placement) -> None:
        self._agreement, self._group, self._partition = agreement, agreement.group, partition
        self._placement, self._window = placement, TransferQueue()

    # -- out ----------------------------------------------------------------------------------------------------------

    def snapshot(self, *, compact: bool) -> StatesByIndex:
        """Return the state in host memory: tensors cut by rows, small ones and numbers in full.

        Args:
            compact: whether compact state is returned as it is.

        Extra memory: the result, and a few tensors on their way.

        Raises:
            StateDictError: on every rank, if state of one cannot be sent, or lacks slices that others have.
            StorageFailed: on every rank, if that of one cannot be read. OutOfMemory: on every rank, if one has no room.
        """
        mine, failed = b"", list[Exception]()
        with self._agreement.together("sharded_state_dict()"):
            local = LocalState.of(self._placement, self._partition, compact=compact)
            mine = listing(local.batches())
        listings = [listed(payload) for payload in self._group.all_gather_bytes(mine)]
        uncut = uncut_over(self._group, self._partition.flats, listings)
        room = IncomingRows(self._partition.flats, listings, uncut, self._group)
        with self._agreement.together(), allocation_errors("sharded_state_dict()"):
            room.make(chain.from_iterable(listings))
        for owner, batches in enumerate(listings):
            for packet in chain.from_iterable(map(packets_apart, batches)):
                (index,), (start,) = packet.params, packet.starts
                rows = room.runs[packet.field.key].get(index)
                if rows is None or not packet.numel:
                    continue
                source, layout = None, room.layout(index, packet.field)
                if owner == self._group.rank:
                    source = message_to_send(local, packet, failed)
                self._between(owner, Span(start, start + packet.numel), source, layout, rows, to_rows=True)
        self._window.drain()
        self._agreement.raise_first_error(next(iter(failed), None))
        return room.by_param()

    # -- in -----------------------------------------------------------------------------------------------------------

    def shards(self, states: Mapping[int, Mapping[str, Any]]) -> StatesByIndex:
        """Return this rank's slices of the given state, which is cut by rows, cut otherwise, or full.

        The ranks have compared keys, shapes, dtypes and how tensors are cut.
        """
        own = {piece.param: piece for piece in self._partition.owned()}
        owners = self._owners()
        mine: StatesByIndex = {index: {} for index in states if index in own}
        for index, state in states.items():
            for key, value in state.items():
                if isinstance(value, DTensor) and self._is_ours(index, value):
                    part = {key: self._from_rows(index, value, owners[index])}
                else:
                    full = value.full_tensor() if isinstance(value, DTensor) else value
                    part = cut({key: full}, own[index], self._partition.flats[index]) if index in own else {}
                if index in mine:
                    mine[index].update(part)
        self._window.drain()
        return mine

    def _owners(self) -> dict[int, list[tuple[int, ParamSlice]]]:
        """Return, per parameter, the ranks that own a slice of it, with that slice."""
        owners: dict[int, list[tuple[int, ParamSlice]]] = {}
        for bucket in self._partition.buckets:
            for rank in range(self._group.world_size):
                for piece in bucket.layout.slices(rank):
                    owners.setdefault(piece.param, []).append((rank, piece))
        return owners

    def _is_ours(self, index: int, value: DTensor) -> bool:
        """Return whether ``value`` is cut over the ranks as :meth:`snapshot` cuts; the same on every rank."""
        if self._group.world_size == 1:  # where it cuts nothing, and the group has no mesh
            return False
        flat, layout = self._partition.flats[index], _layout_of(value)
        if not layout.shape or not layout.numel or value.placements != (Shard(layout.dim),):
            return False
        in_order = self._partition.whole or layout.shape != tuple(flat.shape) or layout.strides == flat.strides
        return in_order and value.device_mesh == self._group.mesh()

    def _from_rows(self, index: int, value: DTensor, owners: list[tuple[int, ParamSlice]]) -> Tensor | None:
        """Move all ranks' rows to the owners; return what this rank owns, filled once everything has arrived."""
        group, flat, layout = self._group, self._partition.flats[index], _layout_of(value)
        rows = torch.empty(layout.run(group.rank, group.world_size).numel, dtype=layout.dtype, device="cpu")
        layout.rows(rows).copy_(value.to_local().detach())
        is_cut = layout.shape == tuple(flat.shape) and not self._partition.whole
        result: Tensor | None = None
        for owner, piece in owners:
            span = piece.in_param if is_cut else Span(0, layout.numel)
            run = torch.empty(span.numel, dtype=layout.dtype, device="cpu") if owner == group.rank else None
            if run is not None:
                result = layout.rows(run) if span.numel == layout.numel else run
            self._between(owner, span, run, layout, rows, to_rows=False)
        return result

    # -- on the way ---------------------------------------------------------------------------------------------------

    def _between(
        self, owner: int, span: Span, run: Tensor | None, layout: RowLayout, rows: Tensor, *, to_rows: bool
    ) -> None:
        """Start to move elements from their owner to the ranks in whose rows they are, or from these to the owner.

        Every rank calls, in one order.

        Args:
            run: the elements ``span``, on the owner. rows: this rank's.
        """
        for rank in layout.ranks_of(span, self._group.world_size):
            theirs = layout.run(rank, self._group.world_size)
            part = overlap(span, theirs)
            owned, cut = _elements(run, span, part), _elements(rows, theirs, part) if rank == self._group.rank else None
            source, target = (owned, cut) if to_rows else (cut, owned)
            if rank != owner:
                src, dst = (owner, rank) if to_rows else (rank, owner)
                tensor = source if self._group.rank == src else target
                self._window.add(self._group.move(tensor, src, dst, part.numel, layout.dtype), tensor)
            elif source is not None and target is not None:
                target.copy_(source)


def _elements(run: Tensor | None, span: Span, part: Span) -> Tensor | None:
    """Return the elements ``part`` of a run that has the elements ``span``."""
    return None if run is None else run[part.start - span.start : part.stop - span.start]


def _layout_of(value: DTensor) -> RowLayout:
    return RowLayout(tuple(value.shape), tuple(value.stride()), value.dtype)


def full_of(value: Tensor) -> Tensor:
    """Return all elements of a tensor. Collective if it is a DTensor."""
    if not isinstance(value, DTensor):
        return value.detach()
    held: Any = value.detach().int() if value.dtype is torch.int16 else value.detach()  # gloo sends no int16
    full: Tensor = held.full_tensor()
    return full.to(value.dtype)


class Rows(NamedTuple):
    """Elements of a saved tensor that are here: all of it, or this rank's rows.

    Attributes:
        run: the elements, 1-D, in the order of the layout. span: which these are. cut: whether they are rows.
    """

    layout: RowLayout
    run: Tensor
    span: Span
    cut: bool

    @classmethod
    def of(cls, value: Tensor, order: tuple[int, ...], group: Group) -> Rows:
        """Return what is here of a tensor that :func:`blank` made; of any other, all of it. Collective.

        Args:
            order: strides, as :func:`element_order` returns them, of the order that the elements are to have.
        """
        if not isinstance(value, DTensor):
            return cls.whole(value, order)
        layout = _layout_of(value)
        by_rows = layout.shape and layout.numel and value.placements == (Shard(layout.dim),)
        if not by_rows or element_order(value.shape, value.stride()) != order:
            return cls.whole(full_of(value), order)
        span = layout.run(group.rank, group.world_size)
        run = torch.empty(span.numel, dtype=layout.dtype, device="cpu")
        layout.rows(run).copy_(value.to_local().detach())
        return cls(layout, run, span, cut=True)

    @classmethod
    def whole(cls, value: Tensor, order: tuple[int, ...]) -> Rows:
        """Return all elements of a tensor, in an order as for :meth:`of`."""
        run = torch.empty(value.numel(), dtype=value.dtype, device="cpu")
        run.as_strided(value.shape, order).copy_(value.detach())
        return cls(RowLayout(tuple(value.shape), order, value.dtype), run, Span(0, value.numel()), cut=False)

    def with_values(self, run: Tensor, group: Group) -> Tensor:
        """Return a tensor like that which these elements are of, with other values."""
        layout = self.layout._replace(dtype=run.dtype)
        return layout.wrap(run, group) if self.cut else run.as_strided(layout.shape, layout.strides)
