"""Full state from the ranks' parts of it: raw tensors, streamed straight into the memory of the result.

Every rank lists its entries as JSON, and the receiver makes room for them. Then elements travel in the order of the
lists. :func:`consolidated` is for all ranks together, :mod:`.service` for a rank that asks alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.groups import check_rank, tensor_bytes
from ..comm.transfers import TransferQueue
from ..errors import StateDictError, StepPending
from ..placement import Placement
from ..sharding.buckets import GradBucket
from ..sharding.flat_param import FlatParam
from ..sharding.partition import Partition
from ..system.readable_pages import require_readable
from ..system.shared_memory import allocation_errors
from .state_dict import StatesByIndex, torch_dtype

# Tensors up to this many elements (step counts) travel inside the listing.
_INLINE_NUMEL = 16
# The most bytes of a message. A sender that must copy its state to send it holds as many as a TransferQueue has.
_CHUNK_BYTES = 4 * 2**20


class Entry(NamedTuple):
    """One state value of one rank's slice of a parameter.

    Attributes:
        kind: "slice" (elements start to start + numel of a tensor of the parameter's shape), "tensor" (a whole tensor
            of its own shape), "inline" (a small one, its bytes in ``value`` as hex) or "value" (a Python number).
    """

    param: int
    key: str
    kind: str
    dtype: str
    shape: list[int]
    start: int
    value: Any

    @property
    def travels(self) -> bool:
        """Whether elements travel besides the entry itself."""
        return self.kind in ("slice", "tensor")

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return torch.Size(self.shape).numel()


def _entry(index: int, key: str, value: Any, part: Tensor, start: int, whole_params: bool) -> Entry:
    if not isinstance(value, Tensor):
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise StateDictError(f"state {key!r} of parameter {index} is a {type(value).__name__}; cannot be sent")
        return Entry(index, key, "value", "", [], 0, value)
    dtype, shape = str(value.dtype), list(value.shape)
    if value.shape == part.shape and not whole_params and value.dim():
        return Entry(index, key, "slice", dtype, [value.numel()], start, None)
    if value.numel() <= _INLINE_NUMEL:
        require_readable(value)
        return Entry(index, key, "inline", dtype, shape, 0, tensor_bytes(value.detach().cpu().contiguous()).hex())
    return Entry(index, key, "tensor", dtype, shape, 0, None)


class LocalState:
    """This rank's state as it is at the moment, and its entries.

    Args:
        flats, buckets, whole: those of the :class:`Partition`.
    """

    def __init__(
        self, placement: Placement, flats: Mapping[int, FlatParam], buckets: Sequence[GradBucket], whole: bool
    ) -> None:
        if placement.pending:
            raise StepPending(
                "a step is pending there, so its state is not that after it; call opt.flush() on every rank"
            )
        self.flats, self._whole = flats, whole
        self._starts = {piece.param: piece.in_param.start for bucket in buckets for piece in bucket.slices}
        self._state = dict(placement.saved())
        self._parts = {index: placement.param_of(index) for index in self._state}

    @classmethod
    def of(cls, placement: Placement, partition: Partition) -> LocalState:
        """Return the state of a placement."""
        return cls(placement, partition.flats, partition.buckets, partition.whole)

    def entries(self) -> Iterator[Entry]:
        """Return the entries that this rank sends.

        Raises:
            StateDictError: a value cannot be sent.
        """
        for index, state in self._state.items():
            start = self._starts[index]
            for key, value in state.items():
                entry = _entry(index, key, value, self._parts[index], start, self._whole)
                # State that is not cut is the same on every owner: the owner of the first element sends it.
                if entry.kind == "slice" or start == 0:
                    yield entry

    def run(self, entry: Entry) -> Tensor:
        """Return the elements of an entry that travels, as a contiguous run where they live."""
        value: Tensor = self._state[entry.param][entry.key].detach()
        if entry.kind == "slice" and value.shape == self.flats[entry.param].shape:
            value = self.flats[entry.param].flatten(value)
        return value.contiguous().view(-1)


class FrozenState:
    """The elements that a :class:`LocalState` has to send, without references to parameters or the optimizer."""

    def __init__(self, state: LocalState) -> None:
        self._runs = {(entry.param, entry.key): state.run(entry) for entry in state.entries() if entry.travels}

    def run(self, entry: Entry) -> Tensor:
        return self._runs[entry.param, entry.key]


class IncomingState:
    """The state of all ranks in host memory, while it comes in."""

    def __init__(self, flats: Mapping[int, FlatParam]) -> None:
        self._flats = flats
        self._states: StatesByIndex = {}

    def _place(self, entry: Entry) -> Tensor | None:
        """Make room for an entry. Return where its elements go, a contiguous run; ``None`` if it came inline."""
        state = self._states.setdefault(entry.param, {})
        if not entry.travels:
            state[entry.key] = small_value(entry)
        elif entry.kind == "tensor":
            if entry.key not in state:
                state[entry.key] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
            full: Tensor = state[entry.key]
            return full.view(-1)
        else:
            flat = self._flats[entry.param]
            if entry.key not in state:
                values = torch.empty(flat.numel, dtype=torch_dtype(entry.dtype), device="cpu")
                state[entry.key] = flat.shaped(values)
            run: Tensor = state[entry.key].as_strided((flat.numel,), (1,))
            return run[entry.start : entry.start + entry.numel]
        return None

    def runs_for(self, entries: Iterable[Entry]) -> list[Tensor]:
        """Make room for a rank's entries; return the runs that its messages go to, in their order.

        Raises:
            OutOfMemory: there is no room.
        """
        with allocation_errors("the optimizer's full state"):
            targets = [(entry, self._place(entry)) for entry in entries]
        return [target[span] for entry, target in targets if target is not None for span in spans(entry)]

    def add_own(self, state: LocalState) -> None:
        """Copy in this rank's own state."""
        entries = list(state.entries())
        runs = iter(self.runs_for(entries))
        for entry in entries:
            for chunk in chunks(state, entry):
                next(runs).copy_(chunk)

    def by_param(self) -> StatesByIndex:
        """Return the state by global parameter index."""
        return {index: self._states[index] for index in sorted(self._states)}


def listing(state: LocalState) -> bytes:
    """Return the entries of a rank's state as JSON."""
    return json.dumps(list(state.entries())).encode()


def listed(payload: bytes) -> list[Entry]:
    """Return the entries in a :func:`listing`."""
    return [Entry(*fields) for fields in json.loads(payload)]


def spans(entry: Entry) -> Iterator[slice]:
    """Return the runs of an entry's elements that travel in one message each."""
    if entry.travels:
        step = _CHUNK_BYTES // torch_dtype(entry.dtype).itemsize
        for start in range(0, entry.numel, step):
            yield slice(start, min(start + step, entry.numel))


def chunks(state: LocalState | FrozenState, entry: Entry) -> Iterator[Tensor]:
    """Return the elements of an entry in host memory, one tensor for each of :func:`spans`."""
    if entry.travels:
        run = state.run(entry)
        for span in spans(entry):
            require_readable(run[span])
            yield run[span].cpu()


def read_to_send(read: Callable[[], Tensor], numel: int, dtype: torch.dtype, failed: list[Exception]) -> Tensor:
    """Return what ``read`` returns, to be sent to a rank that waits for it; once a read has failed, zeros.

    The sender tells the receiver of the error afterwards. So nothing is read twice, and a disk may fail at any moment.

    Args:
        failed: the errors of earlier calls, to which an error of this call is added.
    """
    if not failed:
        try:
            return read()
        except Exception as error:  # whatever it is, the other rank waits
            failed.append(error)
    return torch.zeros(numel, dtype=dtype, device="cpu")


def chunks_to_send(state: LocalState | FrozenState, entry: Entry, failed: list[Exception]) -> Iterator[Tensor]:
    """Return :func:`chunks`, each read by :func:`read_to_send`."""
    parts = chunks(state, entry)
    for span in spans(entry):
        yield read_to_send(partial(next, parts), span.stop - span.start, torch_dtype(entry.dtype), failed)


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
        targets = [[] if result is None else result.runs_for(entries) for entries in listings]
    window, failed = TransferQueue(), list[Exception]()
    for src, entries in enumerate(listings):
        arriving = iter(targets[src])
        for entry in entries:
            sent = chunks_to_send(local, entry, failed) if group.rank == src else iter(())
            for span in spans(entry):
                chunk, place = next(sent, None), next(arriving, None)
                if src != to:
                    moved = place if chunk is None else chunk
                    window.add(group.move(moved, src, to, span.stop - span.start, torch_dtype(entry.dtype)), moved)
                elif chunk is not None and place is not None:
                    place.copy_(chunk)
    window.drain()
    agreement.raise_first_error(next(iter(failed), None))
    return None if result is None else result.by_param()


def small_value(entry: Entry) -> Any:
    """Return the number, text or tensor that traveled inside the listing."""
    if entry.kind == "value":
        return entry.value
    raw = bytearray.fromhex(entry.value)
    if not raw:
        return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
    return torch.frombuffer(raw, dtype=torch_dtype(entry.dtype)).clone().view(entry.shape)
