"""State as tensors cut by rows over the ranks, which ``torch.distributed.checkpoint`` loads at any world size.

A shard is a run of memory that ends anywhere; a ``DTensor`` is cut between rows. So every rank is sent the rows it
stands for, and on loading sends them to whoever owns their elements. Rows are those of the outermost dimension in
memory, dimension 0 but for parameters such as a transposed view; so a rank's rows are one run of memory too.

Imported when first needed: ``torch.distributed.tensor`` takes longer to import than everything else here together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..comm.agreement import Agreement
from ..comm.groups import Group
from ..comm.transfers import TransferQueue
from ..kernels.strides import contiguous_strides, is_dense
from ..layout import ParamSlice, Span
from ..placement import Placement
from ..sharding.partition import Partition
from ..system.readable_pages import require_readable
from .consolidate import Entry, LocalState, listed, listing, read_to_send, small_value
from .state_dict import cut, torch_dtype

States = dict[int, dict[str, Any]]


class Form(NamedTuple):
    """A dense tensor of at least one element and one dimension, as memory: a run, and how ranks cut it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    @property
    def dim(self) -> int:
        """The outermost dimension in memory."""
        sizes = range(len(self.shape))
        return max(sizes, key=lambda dim: (self.shape[dim] != 1, self.strides[dim], -dim))

    def chunk(self, world_size: int) -> int:
        """Elements of a rank's rows; the last ranks may have fewer, or none."""
        rows = self.shape[self.dim]
        return -(-rows // world_size) * (self.numel // rows)

    def run(self, rank: int, world_size: int) -> Span:
        """The elements of a rank's rows."""
        chunk = self.chunk(world_size)
        return Span(min(rank * chunk, self.numel), min((rank + 1) * chunk, self.numel))

    def ranks_of(self, span: Span, world_size: int) -> range:
        """The ranks that have rows in a span of elements."""
        chunk = self.chunk(world_size)
        return range(span.start // chunk, -(-span.stop // chunk)) if span.numel else range(0)

    def rows(self, run: Tensor) -> Tensor:
        """A run of whole rows in the tensor's shape, but for the number of rows."""
        shape = list(self.shape)
        shape[self.dim] = run.numel() * shape[self.dim] // self.numel
        return run.as_strided(shape, self.strides, run.storage_offset())

    def wrap(self, run: Tensor, group: Group) -> Tensor:
        """This rank's rows as part of the whole; at world size 1 they are the whole."""
        if group.world_size == 1:
            return self.rows(run)
        shape = torch.Size(self.shape)
        return DTensor.from_local(
            self.rows(run), group.mesh(), [Shard(self.dim)], run_check=False, shape=shape, stride=self.strides
        )


def overlap(first: Span, second: Span) -> Span:
    """What two spans have in common; empty where they have nothing."""
    start = max(first.start, second.start)
    return Span(start, max(start, min(first.stop, second.stop)))


def blank(value: Tensor, param: Tensor, shape: torch.Size, group: Group) -> Tensor:
    """Stands in for state of ``param`` of the given shape, cut like live state; full of ``value``'s first element."""
    fill = value.detach().reshape(-1)[:1].cpu()
    if not shape or not shape.numel():
        return fill.expand(shape.numel()).reshape(shape).clone()
    strides = param.stride() if shape == param.shape and is_dense(shape, param.stride()) else contiguous_strides(shape)
    form = Form(tuple(shape), strides, value.dtype)
    return form.wrap(fill.repeat(form.run(group.rank, group.world_size).numel), group)


class ShardedState:
    """All ranks' state, between the slices they own and the rows they stand for. Methods are collective."""

    def __init__(self, agreement: Agreement, partition: Partition, placement: Placement) -> None:
        self._agreement, self._group, self._partition = agreement, agreement.group, partition
        self._placement = placement
        self._window = TransferQueue()

    # -- out ----------------------------------------------------------------------------------------------------------

    def snapshot(self) -> States:
        """The state by global parameter index, in host memory: tensors cut by rows, small ones and numbers whole.

        Extra memory: the result, and a few tensors on their way.

        Raises:
            StateDictError: on every rank, if state of one cannot be sent. StorageFailed: on every rank, if that of one
                cannot be read.
        """
        mine, failed = b"", list[Exception]()
        with self._agreement.together("sharded_state_dict()"):
            local = LocalState.of(self._placement, self._partition)
            mine = listing(local)
        runs: dict[tuple[int, str], Tensor] = {}
        result: States = {}
        for owner, payload in enumerate(self._group.all_gather_bytes(mine)):
            for entry in listed(payload):
                found = result.setdefault(entry.param, {})
                if not entry.travels:
                    found[entry.key] = small_value(entry)
                    continue
                form = self._form(entry)
                if not form.numel:
                    found[entry.key] = torch.empty(form.shape, dtype=form.dtype, device="cpu")
                    continue
                if entry.key not in found:
                    run = torch.empty(
                        form.run(self._group.rank, self._group.world_size).numel, dtype=form.dtype, device="cpu"
                    )
                    runs[entry.param, entry.key], found[entry.key] = run, form.wrap(run, self._group)
                source = None
                if owner == self._group.rank:
                    read = partial(_read, local, entry)
                    source = read_to_send(read, entry.numel, torch_dtype(entry.dtype), failed)
                self._to_rows(owner, entry, form, source, runs[entry.param, entry.key])
        self._window.drain()
        self._agreement.raise_first_error(next(iter(failed), None))
        return {index: result[index] for index in sorted(result)}

    def _form(self, entry: Entry) -> Form:
        dtype = torch_dtype(entry.dtype)
        if entry.kind == "tensor":
            return Form(tuple(entry.shape), contiguous_strides(torch.Size(entry.shape)), dtype)
        flat = self._partition.flats[entry.param]
        return Form(tuple(flat.param.shape), flat.strides, dtype)

    def _to_rows(self, owner: int, entry: Entry, form: Form, source: Tensor | None, rows: Tensor) -> None:
        """Move an owner's run of elements to the ranks whose rows they are in; ``rows`` are this rank's."""
        span = Span(entry.start, entry.start + entry.numel)
        for target in form.ranks_of(span, self._group.world_size):
            run = form.run(target, self._group.world_size)
            part = overlap(span, run)
            self._move(
                None if source is None else source[part.start - span.start : part.stop - span.start],
                rows[part.start - run.start : part.stop - run.start] if target == self._group.rank else None,
                (owner, target),
                part.numel,
                form.dtype,
            )

    # -- in -----------------------------------------------------------------------------------------------------------

    def shards(self, states: Mapping[int, Mapping[str, Any]]) -> States:
        """This rank's part of the given state, which may be cut by rows or whole, per parameter it owns a slice of.

        The ranks have compared keys, shapes, dtypes and how tensors are cut.
        """
        own = {piece.param: piece for piece in self._partition.owned()}
        owners = self._owners()
        mine: States = {index: {} for index in states if index in own}
        for index, state in states.items():
            for key, value in state.items():
                local = value
                if isinstance(value, DTensor):
                    if self._is_ours(index, value):
                        local = self._from_rows(index, value, owners[index])
                        if index in mine:
                            mine[index][key] = local
                        continue
                    local = value.full_tensor()
                if index in mine:
                    mine[index].update(cut({key: local}, own[index], self._partition.flats[index]))
        self._window.drain()
        return mine

    def _owners(self) -> dict[int, list[tuple[int, ParamSlice]]]:
        """Per parameter, the ranks that own a part of it, with that part."""
        owners: dict[int, list[tuple[int, ParamSlice]]] = {}
        for bucket in self._partition.buckets:
            for rank in range(self._group.world_size):
                for piece in bucket.layout.slices(rank):
                    owners.setdefault(piece.param, []).append((rank, piece))
        return owners

    def _is_ours(self, index: int, value: DTensor) -> bool:
        """Whether it is cut over the ranks as :meth:`snapshot` cuts; the same on every rank."""
        flat, form = self._partition.flats[index], _form_of(value)
        if not form.shape or not form.numel or value.placements != (Shard(form.dim),):
            return False
        in_order = self._partition.whole or form.shape != tuple(flat.param.shape) or form.strides == flat.strides
        return in_order and value.device_mesh == self._group.mesh()

    def _from_rows(self, index: int, value: DTensor, owners: list[tuple[int, ParamSlice]]) -> Tensor | None:
        """Move all ranks' rows to the owners; what this rank gets, filled once everything has arrived."""
        group, flat, form = self._group, self._partition.flats[index], _form_of(value)
        rows = form.run(group.rank, group.world_size)
        source = torch.empty(rows.numel, dtype=form.dtype, device="cpu")
        form.rows(source).copy_(value.to_local().detach())
        is_cut = form.shape == tuple(flat.param.shape) and not self._partition.whole
        result: Tensor | None = None
        for owner, piece in owners:
            span = piece.in_param if is_cut else Span(0, form.numel)
            run = torch.empty(span.numel, dtype=form.dtype, device="cpu") if owner == group.rank else None
            if run is not None:
                result = form.rows(run) if span.numel == form.numel else run
            for rank in form.ranks_of(span, group.world_size):
                part = overlap(span, form.run(rank, group.world_size))
                self._move(
                    source[part.start - rows.start : part.stop - rows.start] if rank == group.rank else None,
                    None if run is None else run[part.start - span.start : part.stop - span.start],
                    (rank, owner),
                    part.numel,
                    form.dtype,
                )
        return result

    # -- on the way ---------------------------------------------------------------------------------------------------

    def _move(
        self, source: Tensor | None, target: Tensor | None, ends: tuple[int, int], numel: int, dtype: torch.dtype
    ) -> None:
        """Start moving ``numel`` elements between the ranks ``ends``, from and to; every rank calls, in one order."""
        rank, (src, dst) = self._group.rank, ends
        if not numel:
            return
        if src == dst:
            if source is not None and target is not None:
                target.copy_(source)
            return
        tensor = source if rank == src else target
        self._window.add(self._group.move(tensor, src, dst, numel, dtype), tensor)


def _read(state: LocalState, entry: Entry) -> Tensor:
    """An entry's elements in host memory."""
    run = state.run(entry)
    require_readable(run)
    return run.cpu()


def _form_of(value: DTensor) -> Form:
    return Form(tuple(value.shape), tuple(value.stride()), value.dtype)
