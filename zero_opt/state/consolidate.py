"""Full state from the ranks' parts of it: raw tensors, streamed straight into the memory of the result.

Every rank lists its state as JSON, and the receiver makes room for it. Then elements travel in the order of the lists.
:func:`consolidated` is for all ranks together, :mod:`.service` for a rank that asks alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.groups import checked_rank
from ..comm.transfers import TransferQueue
from ..errors import StepPending
from ..kernels.strides import run_of
from ..placement import Placement
from ..placement.compact_state import PlainForm
from ..sharding.buckets import GradBucket
from ..sharding.flat_param import FlatParam
from ..sharding.partition import Partition
from ..system.garbage_collection import without_collection
from ..system.shared_memory import allocation_errors
from .entries import (
    Batch,
    Field,
    Packet,
    Places,
    already_there,
    batches_of,
    listed,
    listing,
    message_for,
    message_to_send,
    packets,
    packets_apart,
    runs_of,
    spread,
)
from .incoming import RoomForState, uncut_over
from .state_dict import StatesByIndex, torch_dtype

_requires_grad = attrgetter("requires_grad")


class LocalState:
    """This rank's state as it is at the moment, and what it lists of that.

    Args:
        flats, buckets, whole: those of the :class:`Partition`. compact: whether compact state is listed as it is.
    """

    @without_collection()
    def __init__(
        self,
        placement: Placement,
        flats: Mapping[int, FlatParam],
        buckets: Sequence[GradBucket],
        whole: bool,
        *,
        compact: bool = False,
    ) -> None:
        if placement.pending:
            raise StepPending(
                "a step is pending there, so its state is not that after it; call opt.flush() on every rank"
            )
        self.flats, self._whole = flats, whole
        self._starts = {piece.param: piece.in_param.start for bucket in buckets for piece in bucket.slices}
        self._state = {
            index: state.as_stored() if compact and isinstance(state, PlainForm) else state
            for index, state in placement.saved()
        }
        self._parts = {index: placement.param_of(index) for index in self._state}
        self._last: tuple[tuple[int, str], Any] = ((-1, ""), None)  # read by runs(): it may have been made for that

    @classmethod
    def of(cls, placement: Placement, partition: Partition, *, compact: bool = False) -> LocalState:
        """Return the state of a placement."""
        return cls(placement, partition.flats, partition.buckets, partition.whole, compact=compact)

    @without_collection()
    def batches(self) -> list[Batch]:
        """Return what this rank lists, and sends.

        Raises:
            StateDictError: a value cannot be sent. StorageFailed: a small one cannot be read.
        """
        return batches_of(self._state, self._parts, self._starts, whole_params=self._whole)

    def runs(self, packet: Packet) -> list[Tensor]:
        """Return the values that a packet is of, each as a contiguous run where it lives."""
        key, is_slice = packet.field.key, packet.field.kind == "slice"
        several = len(packet.params) > 1
        values = [self._state[index][key] if several else self._value(index, key) for index in packet.params]
        if {*map(Tensor.dim, values)} == {1} and all(map(Tensor.is_contiguous, values)):  # its own run, in either order
            return [value.detach() for value in values] if any(map(_requires_grad, values)) else values
        return [self._run(index, value.detach(), is_slice) for index, value in zip(packet.params, values, strict=True)]

    def _value(self, index: int, key: str) -> Tensor:
        """Return a value, which may have been made for this call, and not once more for the next part of it."""
        if self._last[0] != (index, key):
            self._last = (index, key), self._state[index][key]
        value: Tensor = self._last[1]
        return value

    def _run(self, index: int, value: Tensor, is_slice: bool) -> Tensor:
        if is_slice and value.shape == self.flats[index].shape:
            value = self.flats[index].flatten(value)
        return run_of(value.contiguous())

    def copy_to(self, places: Iterable[Places]) -> None:
        """Copy elements to where they go in this rank's result."""
        for packet, targets in places:
            torch._foreach_copy_(targets, runs_of(self, packet))


class FrozenState:
    """The elements that a :class:`LocalState` has to send, without references to parameters or the optimizer."""

    @without_collection()
    def __init__(self, state: LocalState) -> None:
        self._runs: dict[tuple[int, str], Tensor] = {}
        for packet in chain.from_iterable(map(packets_apart, state.batches())):
            (self._runs[packet.params[0], packet.field.key],) = state.runs(packet)

    def runs(self, packet: Packet) -> list[Tensor]:
        """Return what :meth:`LocalState.runs` does."""
        return [self._runs[index, packet.field.key] for index in packet.params]


class IncomingState(RoomForState):
    """The state of all ranks in host memory, while it comes in."""

    def _new(self, field: Field, indices: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        like = torch.empty(0, dtype=torch_dtype(field.dtype), device="cpu")
        if field.kind != "slice":
            runs = [like.new_empty(math.prod(field.shape)) for _ in indices]
            return runs, [run.view(field.shape) for run in runs]
        flats = [self.flats[index] for index in indices]
        runs = [like.new_empty(flat.numel) for flat in flats]
        values = zip(flats, runs, strict=True)
        return runs, [run if len(flat.shape) == 1 else flat.shaped(run) for flat, run in values]

    @without_collection()
    def places_for(self, batches: Sequence[Batch]) -> list[Places]:
        """Make room for what a rank lists; return where the elements of each of its :func:`packets` go.

        Raises:
            OutOfMemory: there is no room.
        """
        with allocation_errors("the optimizer's full state"):
            self.make(batches)
        return [(packet, self._places_of(packet)) for packet in packets(batches)]

    def _places_of(self, packet: Packet) -> list[Tensor]:
        runs, places = self.runs[packet.field.key], []
        for index, start, numel in zip(packet.params, packet.starts, packet.numels, strict=True):
            run = runs.get(index)
            if run is None:  # not a slice, but sent as one: received and dropped
                places.append(torch.empty(numel, dtype=packet.dtype, device="cpu"))
            else:
                places.append(run if numel == run.numel() else run[start : start + numel])
        return [packet.part(place) for place in places]


def consolidated(agreement: Agreement, partition: Partition, placement: Placement, to: int) -> StatesByIndex | None:
    """Return the full state on rank ``to``, in host memory; ``None`` elsewhere. Collective.

    Extra memory: the result on ``to``; elsewhere at most a few messages on their way.

    Raises:
        ConfigError, ConfigTypeError: on every rank, if ``to`` is not a rank on one. RankMismatch: they differ.
        StateDictError: on every rank, if state of one cannot be sent, or lacks slices that others have.
        StorageFailed: on every rank, if that of one cannot be read. OutOfMemory: on every rank, if ``to`` has no room.
    """
    group, mine = agreement.group, b""
    local = LocalState.of(placement, partition)
    with agreement.together("consolidate_state_dict()"):
        to = checked_rank(to, group.world_size, "to")
        mine = listing(local.batches())
    agreement.require_same_contents([("rank to consolidate to", to)])
    listings = [listed(payload) for payload in group.all_gather_bytes(mine)]
    uncut = uncut_over(group, partition.flats, listings)
    result = IncomingState(partition.flats, listings, uncut) if group.rank == to else None
    with agreement.together():
        if result is None:
            messages = [[(packet, list[Tensor]()) for packet in packets(batches)] for batches in listings]
        else:
            messages = [result.places_for(batches) for batches in listings]
    window, failed = TransferQueue(), list[Exception]()
    for src, from_src in enumerate(messages):
        for packet, places in from_src:
            message = message_to_send(local, packet, failed) if group.rank == src else None
            if src == to:
                if message is not None:
                    spread(message, places)
                continue
            arrived = already_there
            if group.rank == to:
                message, arrived = message_for(places)
            window.add(group.move(message, src, to, packet.numel, packet.dtype), message, arrived)
    window.drain()
    agreement.raise_first_error(next(iter(failed), None))
    return None if result is None else result.by_param()
