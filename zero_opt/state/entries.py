"""Entries of state that ranks list for each other, and the messages in which the entries' elements travel."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..comm.groups import tensor_bytes
from ..errors import StateDictError
from ..kernels.runs import BASES, BLOCK_NUMEL
from ..system.readable_pages import require_readable
from .state_dict import dtype_name, is_plain, torch_dtype

if TYPE_CHECKING:
    from .consolidate import FrozenState, LocalState

# Tensors up to this many elements (step counts) travel inside the listing.
_INLINE_NUMEL = 16
# The most bytes of a message. A sender that must copy its state to send it holds as many as a TransferQueue has.
_CHUNK_BYTES = 4 * 2**20
# Elements of fewer bytes share a message: copying them costs less than a message of their own.
_SMALL_BYTES = 1 << 18


class Entry(NamedTuple):
    """One state value of one rank's slice of a parameter.

    Attributes:
        kind: "slice" (elements start to start + numel of a tensor of the parameter's shape), "blocks" (the same of a
            1-D tensor with an element for each block of the parameter's), "tensor" (a whole tensor of its own shape),
            "inline" (a small one, its bytes in ``value`` as hex) or "value" (a Python number).
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
        return self.kind in ("slice", "blocks", "tensor")

    @property
    def numel(self) -> int:
        """Elements that travel."""
        return math.prod(self.shape)


# Entries whose elements travel in one message, each with the run of them.
Packet = list[tuple[Entry, slice]]
# A packet, and where its elements go.
Places = tuple[Packet, list[Tensor]]


def is_small(value: Any) -> bool:
    """Return whether a value may be a tensor that travels inside the listing, so that listing it reads it."""
    return isinstance(value, Tensor) and value.numel() <= _INLINE_NUMEL


def state_entry(index: int, key: str, value: Any, part: Tensor, start: int, whole_params: bool) -> Entry:
    """Return the entry of one value.

    Args:
        value: can be read, if it :func:`is_small`. part: what is stepped for the slice.
        start: of the slice, in the parameter. whole_params: slices are whole.

    Raises:
        StateDictError: the value cannot be sent.
    """
    if not is_plain(key):
        raise StateDictError(f"the state of parameter {index} has a {type(key).__name__} as a key; cannot be sent")
    if not isinstance(value, Tensor):
        if not is_plain(value):
            raise StateDictError(f"state {key!r} of parameter {index} is a {type(value).__name__}; cannot be sent")
        return Entry(index, key, "value", "", [], 0, value)
    dtype = dtype_name(value.dtype)
    if key in BASES and value.dtype is torch.int16:
        return Entry(index, key, "blocks", dtype, [value.numel()], start // BLOCK_NUMEL, None)
    if value.dim() and not whole_params and value.shape == part.shape:
        return Entry(index, key, "slice", dtype, [value.numel()], start, None)
    if value.numel() <= _INLINE_NUMEL:
        here = value if value.is_cpu and value.is_contiguous() else value.detach().cpu().contiguous()
        return Entry(index, key, "inline", dtype, list(value.shape), 0, tensor_bytes(here).hex())
    return Entry(index, key, "tensor", dtype, list(value.shape), 0, None)


def listed(payload: bytes) -> list[Entry]:
    """Return the entries in a :func:`listing`."""
    return [Entry(*fields) for fields in json.loads(payload)]


def small_value(entry: Entry) -> Any:
    """Return the number, text or tensor that traveled inside the listing."""
    if entry.kind == "value":
        return entry.value
    value, raw = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu"), bytes.fromhex(entry.value)
    ctypes.memmove(value.data_ptr(), raw, len(raw))
    return value


def packets(entries: Iterable[Entry]) -> Iterator[Packet]:
    """Yield what travels in one message each, in this order: part of one entry's elements, or those of small ones."""
    small: Packet = []
    nbytes = 0
    for entry in entries:
        if not entry.travels:
            continue
        itemsize, numel = torch_dtype(entry.dtype).itemsize, entry.numel
        size = numel * itemsize
        if size > _SMALL_BYTES:
            for start in range(0, numel, _CHUNK_BYTES // itemsize):
                yield [(entry, slice(start, min(start + _CHUNK_BYTES // itemsize, numel)))]
        elif size:
            if small and (nbytes + size > _CHUNK_BYTES or entry.dtype != small[0][0].dtype):
                yield small
                small, nbytes = [], 0
            small.append((entry, slice(0, numel)))
            nbytes += size
    if small:
        yield small


def numel_of(packet: Packet) -> int:
    """Return how many elements a message has."""
    return sum(span.stop - span.start for _, span in packet)


def dtype_of(packet: Packet) -> torch.dtype:
    """Return the dtype of a message."""
    return torch_dtype(packet[0][0].dtype)


def runs_of(state: LocalState | FrozenState, packet: Packet) -> list[Tensor]:
    """Return the elements of a message, where they live.

    Raises:
        StorageFailed: they are a file's, and cannot be read.
    """
    runs = [within(state.run(entry), span) for entry, span in packet]
    require_readable(*runs)
    return runs


def within(run: Tensor, span: slice) -> Tensor:
    """Return a part of a run; the run itself, sooner than a view of it, if that is all of it."""
    return run if not span.start and span.stop == run.numel() else run[span]


def message_of(state: LocalState | FrozenState, packet: Packet) -> Tensor:
    """Return a message's elements in host memory, 1-D; where they live, if they lie together there."""
    runs = runs_of(state, packet)
    if len({run.device for run in runs}) > 1:
        runs = [run.cpu() for run in runs]
    return (runs[0] if len(runs) == 1 else torch.cat(runs)).cpu()


def message_for(places: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Return a tensor to receive a message in, and a function that brings its elements to ``places`` afterwards."""
    if len(places) == 1:
        return places[0], already_there
    message = torch.empty(sum(place.numel() for place in places), dtype=places[0].dtype, device="cpu")
    return message, partial(spread, message, places)


def spread(message: Tensor, places: Sequence[Tensor]) -> None:
    """Bring a message's elements to ``places``."""
    torch._foreach_copy_(list(places), list(torch.split(message, [place.numel() for place in places])))


def already_there() -> None:
    """End a message that has been received where its elements belong."""


def message_to_send(state: LocalState | FrozenState, packet: Packet, failed: list[Exception]) -> Tensor:
    """Return :func:`message_of` a packet, to be sent to a rank that waits for it; once a read has failed, zeros.

    The sender tells the receiver of the error afterwards. So nothing is read twice, and a disk may fail at any moment.

    Args:
        failed: the errors of earlier calls, to which an error of this call is added.
    """
    if not failed:
        try:
            return message_of(state, packet)
        except Exception as error:  # whatever it is, the other rank waits
            failed.append(error)
    return torch.zeros(numel_of(packet), dtype=dtype_of(packet), device="cpu")
