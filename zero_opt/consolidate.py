"""Bring all state to one rank: raw tensors, streamed straight into the memory of the result."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .agreement import Agreement
from .collectives import check_rank, tensor_bytes
from .errors import StateDictError
from .partition import Partition
from .placement import Placement
from .state_dict import torch_dtype

# Tensors up to this many elements (step counts) travel inside the listing.
_INLINE_NUMEL = 16
# Messages under way at a time.
_WINDOW = 8


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
    def numel(self) -> int:
        """Elements that travel."""
        return torch.Size(self.shape).numel()


def entry_of(index: int, key: str, value: Any, part: Tensor, start: int, whole_params: bool) -> Entry:
    """The entry that stands for a state value of the slice ``part`` of a parameter, which begins at ``start``.

    Raises:
        StateDictError: it cannot be sent.
    """
    if not isinstance(value, Tensor):
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise StateDictError(f"state {key!r} of parameter {index} is a {type(value).__name__}; cannot be sent")
        return Entry(index, key, "value", "", [], 0, value)
    dtype, shape = str(value.dtype), list(value.shape)
    if value.shape == part.shape and not whole_params and value.dim():
        return Entry(index, key, "slice", dtype, [value.numel()], start, None)
    if value.numel() <= _INLINE_NUMEL:
        return Entry(index, key, "inline", dtype, shape, 0, tensor_bytes(value.detach().cpu().contiguous()).hex())
    return Entry(index, key, "tensor", dtype, shape, 0, None)


class Consolidation:
    """One collective pass over all ranks' state."""

    def __init__(self, agreement: Agreement, partition: Partition, placement: Placement) -> None:
        self._agreement, self._group, self._partition = agreement, agreement.group, partition
        self._parts = {index: placement.param_of(index) for index, _ in placement.state()}
        self._state = dict(placement.state())

    def run(self, to: int) -> dict[int, dict[str, Any]] | None:
        """The full state by global parameter index on rank ``to``, in host memory; ``None`` elsewhere. Collective.

        Extra memory: the result on ``to``; elsewhere at most a few tensors on their way.

        Raises:
            ConfigError, ConfigTypeError: on every rank, if ``to`` is not a rank on one. RankMismatch: they differ.
            StateDictError: on every rank, if state of one cannot be sent.
        """
        listed = [json.loads(payload) for payload in self._group.all_gather_bytes(self._listing(to))]
        result: dict[int, dict[str, Any]] | None = {} if self._group.rank == to else None
        under_way: deque[tuple[Any, Tensor]] = deque()
        for src, entries in enumerate(listed):
            for entry in (Entry(*fields) for fields in entries):
                target = None if result is None else self._place(result, entry)
                if entry.kind in ("slice", "tensor"):
                    self._transfer(entry, src, to, target, under_way)
        while under_way:
            under_way.popleft()[0].wait()
        return None if result is None else {index: result[index] for index in sorted(result)}

    def _listing(self, to: int) -> bytes:
        """What this rank will send, as JSON, once all ranks can and mean the same receiver. Collective."""
        mine: list[Entry] = []
        with self._agreement.together("consolidate_state_dict()"):
            check_rank(to, self._group.world_size, "to")
            mine.extend(self._entries())
        self._agreement.on_contents([("rank to consolidate to", to)])
        return json.dumps(mine).encode()

    def _entries(self) -> Iterator[Entry]:
        spans = {piece.param: piece.in_param for piece in self._partition.owned()}
        for index, state in self._state.items():
            start = spans[index].start
            for key, value in state.items():
                entry = entry_of(index, key, value, self._parts[index], start, self._partition.whole)
                # What is not cut is the same on every owner: the owner of the first element speaks for all.
                if entry.kind == "slice" or start == 0:
                    yield entry

    def _place(self, result: dict[int, dict[str, Any]], entry: Entry) -> Tensor | None:
        """Where on the target an entry's elements go, a contiguous run; makes room, and fills in what came inline."""
        state = result.setdefault(entry.param, {})
        if entry.kind == "value":
            state[entry.key] = entry.value
        elif entry.kind == "inline":
            state[entry.key] = inline_value(entry)
        elif entry.kind == "tensor":
            whole = state[entry.key] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
            return whole.view(-1)
        else:
            flat = self._partition.flats[entry.param]
            if entry.key not in state:
                state[entry.key] = flat.shaped(torch.empty(flat.param.numel(), dtype=torch_dtype(entry.dtype)))
            run: Tensor = state[entry.key].as_strided((flat.param.numel(),), (1,))
            return run[entry.start : entry.start + entry.numel]
        return None

    def _source(self, entry: Entry) -> Tensor:
        """This rank's elements of an entry as a contiguous run in host memory."""
        value: Tensor = self._state[entry.param][entry.key].detach()
        if entry.kind == "slice" and value.shape == self._partition.flats[entry.param].param.shape:
            value = self._partition.flats[entry.param].flatten(value)
        return value.contiguous().view(-1).cpu()

    def _transfer(
        self, entry: Entry, src: int, to: int, target: Tensor | None, under_way: deque[tuple[Any, Tensor]]
    ) -> None:
        rank = self._group.rank
        if src == to:
            if rank == to and target is not None:
                target.copy_(self._source(entry))
            return
        tensor = self._source(entry) if rank == src else target
        work = self._group.move(tensor, src, to, entry.numel, torch_dtype(entry.dtype))
        if work is not None and tensor is not None:
            under_way.append((work, tensor))
            if len(under_way) > _WINDOW:
                under_way.popleft()[0].wait()


def inline_value(entry: Entry) -> Tensor:
    """The tensor that travelled inside the listing."""
    raw = bytearray.fromhex(entry.value)
    if not raw:
        return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
    return torch.frombuffer(raw, dtype=torch_dtype(entry.dtype)).clone().view(entry.shape)
