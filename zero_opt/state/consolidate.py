"""Full state from the ranks' parts of it: raw tensors, streamed straight into the memory of the result.

Every rank lists what it has as JSON; the receiver makes room for it; then elements travel in the order of the lists.
:class:`Consolidation` does so with all ranks together, ``service`` for a rank that asks alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from .state_dict import torch_dtype

# Tensors up to this many elements (step counts) travel inside the listing.
_INLINE_NUMEL = 16
# The most bytes of a message; a sender that must copy its state to send it holds as many as a TransferQueue has.
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
        """Whether there is more to send than this entry."""
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
    """This rank's state as it is at the moment: what it has to send, and where that is.

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
        self._flats, self._whole = flats, whole
        self._starts = {piece.param: piece.in_param.start for bucket in buckets for piece in bucket.slices}
        self._state = dict(placement.saved())
        self._parts = {index: placement.param_of(index) for index in self._state}

    @classmethod
    def of(cls, placement: Placement, partition: Partition) -> LocalState:
        """That of a placement."""
        return cls(placement, partition.flats, partition.buckets, partition.whole)

    def entries(self) -> Iterator[Entry]:
        """What this rank has.

        Raises:
            StateDictError: it cannot be sent.
        """
        for index, state in self._state.items():
            start = self._starts[index]
            for key, value in state.items():
                entry = _entry(index, key, value, self._parts[index], start, self._whole)
                # What is not cut is the same on every owner: the owner of the first element speaks for all.
                if entry.kind == "slice" or start == 0:
                    yield entry

    def run(self, entry: Entry) -> Tensor:
        """The elements of an entry that travels, as a contiguous run where they live."""
        value: Tensor = self._state[entry.param][entry.key].detach()
        if entry.kind == "slice" and value.shape == self._flats[entry.param].param.shape:
            value = self._flats[entry.param].flatten(value)
        return value.contiguous().view(-1)


class FrozenState:
    """What a :class:`LocalState` has to send, without a way to the parameters or the optimizer."""

    def __init__(self, state: LocalState) -> None:
        self._runs = {(entry.param, entry.key): state.run(entry) for entry in state.entries() if entry.travels}

    def run(self, entry: Entry) -> Tensor:
        return self._runs[entry.param, entry.key]


class FullState:
    """The state of all ranks, in host memory, as it comes in."""

    def __init__(self, flats: Mapping[int, FlatParam]) -> None:
        self._flats = flats
        self._states: dict[int, dict[str, Any]] = {}

    def place(self, entry: Entry) -> Tensor | None:
        """Where an entry's elements go, a contiguous run; makes room, and fills in what came inline."""
        state = self._states.setdefault(entry.param, {})
        if not entry.travels:
            state[entry.key] = small_value(entry)
        elif entry.kind == "tensor":
            whole = state[entry.key] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
            return whole.view(-1)
        else:
            flat = self._flats[entry.param]
            if entry.key not in state:
                values = torch.empty(flat.param.numel(), dtype=torch_dtype(entry.dtype), device="cpu")
                state[entry.key] = flat.shaped(values)
            run: Tensor = state[entry.key].as_strided((flat.param.numel(),), (1,))
            return run[entry.start : entry.start + entry.numel]
        return None

    def add_own(self, state: LocalState) -> None:
        """Copy in what this rank has itself."""
        for entry in state.entries():
            target = self.place(entry)
            if target is not None:
                for span, chunk in zip(spans(entry), chunks(state, entry), strict=True):
                    target[span].copy_(chunk)

    def by_param(self) -> dict[int, dict[str, Any]]:
        """The state by global parameter index."""
        return {index: self._states[index] for index in sorted(self._states)}


def listing(state: LocalState) -> bytes:
    """The entries of a rank's state as JSON."""
    return json.dumps(list(state.entries())).encode()


def listed(payload: bytes) -> list[Entry]:
    """The entries of another rank."""
    return [Entry(*fields) for fields in json.loads(payload)]


def spans(entry: Entry) -> Iterator[slice]:
    """The runs of an entry's elements that travel in one message each."""
    if entry.travels:
        step = _CHUNK_BYTES // torch_dtype(entry.dtype).itemsize
        for start in range(0, entry.numel, step):
            yield slice(start, min(start + step, entry.numel))


def chunks(state: LocalState | FrozenState, entry: Entry) -> Iterator[Tensor]:
    """The elements of an entry in host memory, one tensor for each of :func:`spans`."""
    if entry.travels:
        run = state.run(entry)
        for span in spans(entry):
            require_readable(run[span])
            yield run[span].cpu()


def read_to_send(read: Callable[[], Tensor], numel: int, dtype: torch.dtype, failed: list[Exception]) -> Tensor:
    """Return what ``read`` does, for a rank that waits for it: once that has failed, zeros in its place.

    The sender tells that rank afterwards, so nothing is read twice and a disk may fail at any moment.

    Args:
        failed: is given the error, and holds those of earlier calls.
    """
    if not failed:
        try:
            return read()
        except Exception as error:  # whatever it is, the other rank waits
            failed.append(error)
    return torch.zeros(numel, dtype=dtype, device="cpu")


def chunks_to_send(state: LocalState | FrozenState, entry: Entry, failed: list[Exception]) -> Iterator[Tensor]:
    """As :func:`chunks`, each by :func:`read_to_send`."""
    parts = chunks(state, entry)
    for span in spans(entry):
        yield read_to_send(partial(next, parts), span.stop - span.start, torch_dtype(entry.dtype), failed)


class Consolidation:
    """One collective pass over all ranks' state."""

    def __init__(self, agreement: Agreement, partition: Partition, placement: Placement) -> None:
        self._agreement, self._group, self._partition = agreement, agreement.group, partition
        self._state = LocalState.of(placement, partition)

    def run(self, to: int) -> dict[int, dict[str, Any]] | None:
        """The full state by global parameter index on rank ``to``, in host memory; ``None`` elsewhere. Collective.

        Extra memory: the result on ``to``; elsewhere at most a few messages on their way.

        Raises:
            ConfigError, ConfigTypeError: on every rank, if ``to`` is not a rank on one. RankMismatch: they differ.
            StateDictError: on every rank, if state of one cannot be sent. StorageFailed: on every rank, if that of one
                cannot be read.
        """
        payloads = self._group.all_gather_bytes(self._listing(to))
        result = FullState(self._partition.flats) if self._group.rank == to else None
        window, failed = TransferQueue(), list[Exception]()
        for src, payload in enumerate(payloads):
            if src != to:
                for entry in listed(payload):
                    mine = chunks_to_send(self._state, entry, failed) if self._group.rank == src else iter(())
                    self._transfer(entry, (src, to), mine, None if result is None else result.place(entry), window)
            elif result is not None:
                try:
                    result.add_own(self._state)
                except Exception as error:  # whatever it is, the other ranks still send
                    failed.append(error)
        window.drain()
        self._agreement.raise_first_error(next(iter(failed), None))
        return None if result is None else result.by_param()

    def _listing(self, to: int) -> bytes:
        """What this rank will send, once all ranks can and mean the same receiver. Collective."""
        mine = b""
        with self._agreement.together("consolidate_state_dict()"):
            check_rank(to, self._group.world_size, "to")
            mine = listing(self._state)
        self._agreement.on_contents([("rank to consolidate to", to)])
        return mine

    def _transfer(
        self, entry: Entry, ends: tuple[int, int], mine: Iterator[Tensor], target: Tensor | None, window: TransferQueue
    ) -> None:
        """Move the elements of an entry between the ranks ``ends``, from and to."""
        for span in spans(entry):
            chunk = next(mine, None if target is None else target[span])
            window.add(self._group.move(chunk, *ends, span.stop - span.start, torch_dtype(entry.dtype)), chunk)


def small_value(entry: Entry) -> Any:
    """The number, text or tensor that traveled inside the listing."""
    if entry.kind == "value":
        return entry.value
    raw = bytearray.fromhex(entry.value)
    if not raw:
        return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
    return torch.frombuffer(raw, dtype=torch_dtype(entry.dtype)).clone().view(entry.shape)
