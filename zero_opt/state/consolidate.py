"""Full state from the ranks' parts of it: raw tensors, streamed straight into the memory of the result.

Every rank lists its entries as JSON, and the receiver makes room for them. Then elements travel in the order of the
lists. :func:`consolidated` is for all ranks together, :mod:`.service` for a rank that asks alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.groups import check_rank
from ..comm.transfers import TransferQueue
from ..errors import StepPending
from ..placement import Placement
from ..placement.compact_state import PlainForm
from ..sharding.buckets import GradBucket
from ..sharding.flat_param import FlatParam
from ..sharding.partition import Partition
from ..system.readable_pages import require_readable
from ..system.shared_memory import allocation_errors
from .entries import (
    Entry,
    Places,
    already_there,
    dtype_of,
    is_small,
    listed,
    message_for,
    message_to_send,
    numel_of,
    packets,
    runs_of,
    small_value,
    spread,
    state_entry,
    within,
)
from .state_dict import StatesByIndex, torch_dtype


class LocalState:
    """This rank's state as it is at the moment, and its entries.

    Args:
        flats, buckets, whole: those of the :class:`Partition`. compact: whether compact state is listed as it is.
    """

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
            index: state.as_it_is() if compact and isinstance(state, PlainForm) else state
            for index, state in placement.saved()
        }
        self._parts = {index: placement.param_of(index) for index in self._state}
        self._last: tuple[tuple[int, str], Any] = ((-1, ""), None)  # read by run(): it may have been made for that

    @classmethod
    def of(cls, placement: Placement, partition: Partition, *, compact: bool = False) -> LocalState:
        """Return the state of a placement."""
        return cls(placement, partition.flats, partition.buckets, partition.whole, compact=compact)

    def entries(self) -> Iterator[Entry]:
        """Return the entries that this rank sends.

        Raises:
            StateDictError: a value cannot be sent. StorageFailed: a small one cannot be read.
        """
        require_readable(*(value for state in self._state.values() for value in state.values() if is_small(value)))
        for index, state in self._state.items():
            start = self._starts[index]
            for key, value in state.items():
                entry = state_entry(index, key, value, self._parts[index], start, self._whole)
                # State that is not cut is the same on every owner: the owner of the first element sends it.
                if entry.kind in ("slice", "blocks") or start == 0:
                    yield entry

    def run(self, entry: Entry) -> Tensor:
        """Return the elements of an entry that travels, as a contiguous run where they live."""
        if self._last[0] != (entry.param, entry.key):
            self._last = (entry.param, entry.key), self._state[entry.param][entry.key]
        value: Tensor = self._last[1]
        if value.dim() == 1 and value.is_contiguous():  # which is its own run, in either order
            return value.detach() if value.requires_grad else value
        value = value.detach()
        if entry.kind == "slice" and value.shape == self.flats[entry.param].shape:
            value = self.flats[entry.param].flatten(value)
        return value.contiguous().view(-1)

    def copy_to(self, places: Iterable[Places]) -> None:
        """Copy elements to where they go in this rank's result."""
        for packet, targets in places:
            torch._foreach_copy_(targets, runs_of(self, packet))


class FrozenState:
    """The elements that a :class:`LocalState` has to send, without references to parameters or the optimizer."""

    def __init__(self, state: LocalState) -> None:
        self._runs = {(entry.param, entry.key): state.run(entry) for entry in state.entries() if entry.travels}

    def run(self, entry: Entry) -> Tensor:
        """Return what :meth:`LocalState.run` does."""
        return self._runs[entry.param, entry.key]


class IncomingState:
    """The state of all ranks in host memory, while it comes in."""

    def __init__(self, flats: Mapping[int, FlatParam]) -> None:
        self._flats = flats
        self._states: StatesByIndex = {}
        self._values: dict[tuple[int, str], Tensor] = {}  # 1-D, of what travels

    def _place(self, entry: Entry) -> None:
        """Make room for an entry, unless another rank's entry has; what came inline is there at once."""
        state = self._states.setdefault(entry.param, {})
        if not entry.travels:
            state[entry.key] = small_value(entry)
        elif entry.key not in state:
            flat = self._flats[entry.param] if entry.kind == "slice" else None
            shape = entry.shape if flat is None else flat.shape
            numel = math.prod(shape) if flat is None else flat.numel
            values = torch.empty(numel, dtype=torch_dtype(entry.dtype), device="cpu")
            self._values[entry.param, entry.key] = values
            if len(shape) != 1:
                values = values.view(shape) if flat is None else flat.shaped(values)
            state[entry.key] = values

    def places_for(self, entries: Sequence[Entry]) -> list[Places]:
        """Make room for a rank's entries; return where the elements of each of its :func:`packets` go.

        Raises:
            OutOfMemory: there is no room.
        """
        with allocation_errors("the optimizer's full state"):
            for entry in entries:
                self._place(entry)
        return [(packet, [within(self._run(entry), span) for entry, span in packet]) for packet in packets(entries)]

    def _run(self, entry: Entry) -> Tensor:
        """Return where the elements of an entry go."""
        return within(self._values[entry.param, entry.key], slice(entry.start, entry.start + entry.numel))

    def by_param(self) -> StatesByIndex:
        """Return the state by global parameter index."""
        return {index: self._states[index] for index in sorted(self._states)}


def listing(state: LocalState) -> bytes:
    """Return the entries of a rank's state as JSON."""
    return json.dumps(list(state.entries())).encode()


def consolidated(agreement: Agreement, partition: Partition, placement: Placement, to: int) -> StatesByIndex | None:
    """Return the full state on rank ``to``, in host memory; ``None`` elsewhere. Collective.

    Extra memory: the result on ``to``; elsewhere at most a few messages on their way.

    Raises:
        ConfigError, ConfigTypeError: on every rank, if ``to`` is not a rank on one. RankMismatch: they differ.
        StateDictError: on every rank, if state of one cannot be sent. StorageFailed: on every rank, if that of one
            cannot be read. OutOfMemory: on every rank, if ``to`` has no room.
    """
    group, mine = agreement.group, b""
    local = LocalState.of(placement, partition)
    with agreement.together("consolidate_state_dict()"):
        check_rank(to, group.world_size, "to")
        mine = listing(local)
    agreement.require_same_contents([("rank to consolidate to", to)])
    listings = [listed(payload) for payload in group.all_gather_bytes(mine)]
    result = IncomingState(partition.flats) if group.rank == to else None
    with agreement.together():
        if result is None:
            messages = [[(packet, list[Tensor]()) for packet in packets(entries)] for entries in listings]
        else:
            messages = [result.places_for(entries) for entries in listings]
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
            window.add(group.move(message, src, to, numel_of(packet), dtype_of(packet)), message, arrived)
    window.drain()
    agreement.raise_first_error(next(iter(failed), None))
    return None if result is None else result.by_param()
