"""Batches of state that ranks list for each other, and the messages in which the elements of a batch travel."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..comm.groups import bytes_tensor, tensor_bytes
from ..errors import StateDictError
from ..kernels.checks import oddity
from ..kernels.runs import BASES, BLOCK_NUMEL, INT16, blocks_of
from ..kernels.strides import dimensions_of
from ..system.garbage_collection import without_collection
from ..system.readable_pages import require_readable
from .state_dict import dtype_name, is_plain, torch_dtype
from .usual_states import columns_of_alike

if TYPE_CHECKING:
    from .consolidate import FrozenState, LocalState

# Tensors up to this many elements (step counts) travel inside the listing.
_INLINE_NUMEL = 16
# The most bytes of a message. A sender that must copy its state to send it holds as many as a TransferQueue has.
_CHUNK_BYTES = 4 * 2**20
# Elements of fewer bytes share a message: copying them costs less than a message of their own.
_SMALL_BYTES = 1 << 18
_ALL = slice(None)


class Field(NamedTuple):
    """The values that slices have under one key.

    Attributes:
        kind: "slice" (the slice's elements of a tensor of the parameter's shape), "blocks" (the same of a 1-D tensor
            with an element for each block of the parameter's), "tensor" (a whole tensor of its own shape), "inline"
            (small ones, their bytes one after the other in ``values`` as hex) or "value" (Python numbers in
            ``values``).
        shape: of each tensor, where it is not that of the slice or of its blocks.
    """

    key: str
    kind: str
    dtype: str
    shape: list[int]
    values: Any

    @property
    def travels(self) -> bool:
        """Whether elements travel besides the field itself."""
        return self.is_cut or self.kind == "tensor"

    @property
    def is_cut(self) -> bool:
        """Whether each rank has the elements of its slices."""
        return self.kind in ("slice", "blocks")


class Batch(NamedTuple):
    """Slices of one rank whose states have the same keys, and values of the same kinds.

    Attributes:
        params: by global index. starts, numels: of each slice, in elements of its parameter.
    """

    params: list[int]
    starts: list[int]
    numels: list[int]
    fields: list[Field]

    def numels_of(self, field: Field) -> list[int]:
        """Return how many elements of each member's value travel."""
        if field.kind == "blocks":
            return [blocks_of(numel) for numel in self.numels]
        return self.numels if field.kind == "slice" else [math.prod(field.shape)] * len(self.params)


class Packet(NamedTuple):
    """Elements that travel in one message: of some members of a batch, or a part of those of one member.

    Attributes:
        first, stop: the members. span: of the elements of each.
        numel: of all together.
    """

    batch: Batch
    field: Field
    first: int
    stop: int
    span: slice
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return torch_dtype(self.field.dtype)

    @property
    def params(self) -> list[int]:
        """Global indices of the members' parameters."""
        return self.batch.params[self.first : self.stop]

    @property
    def starts(self) -> list[int]:
        """Where each member's elements begin in the whole tensor."""
        starts = self.batch.starts[self.first : self.stop]
        return [start // BLOCK_NUMEL for start in starts] if self.field.kind == "blocks" else starts

    @property
    def numels(self) -> list[int]:
        """How many elements of each member travel, in this message and others."""
        return self.batch.numels_of(self.field)[self.first : self.stop]

    def part(self, run: Tensor) -> Tensor:
        """Return what travels of a member's elements."""
        return run if self.span is _ALL else run[self.span]


# A packet, and where its elements go.
Places = tuple[Packet, list[Tensor]]


def _oddity(value: Tensor) -> str | None:
    """Return what a tensor is whose elements cannot be sent. :func:`oddity`, which is slower, sees odd ones alone."""
    plain = type(value) is Tensor and value.layout is torch.strided
    return None if plain and not (value.is_nested or value.is_quantized or value.is_meta) else oddity(value)


_CANNOT_BE_PART = (
    "which cannot be part of the full state; let the class keep tensors, numbers, strings, booleans or None, under "
    "keys that are strings or numbers"
)
_KEEP_DENSE = "so it cannot be saved; use a class whose state is dense"
_FOR_SPARSE_GRADS = ", as torch.optim.SparseAdam, or dense gradients (sparse=False in the module)"

# Of each value of a slice's state: its key and the key's type, its kind, dtype and shape.
_Sent = tuple[tuple[Any, type, str, torch.dtype | None, torch.Size | None], ...]


def _sent_of(index: int, state: Mapping[str, Any], part: Tensor, start: int, *, whole_params: bool) -> _Sent:
    """Return what a rank sends of a slice's state, and as what.

    State that is not cut is the same on every owner: the owner of the first element sends it.

    Raises:
        StateDictError: a value cannot be sent.
    """
    form: list[Any] = []
    for key, value in state.items():
        if type(key) is not str and not is_plain(key):
            raise StateDictError(
                f"the state of parameter {index} has a {type(key).__name__} as a key, {_CANNOT_BE_PART}"
            )
        if not isinstance(value, Tensor):
            if not is_plain(value):
                raise StateDictError(
                    f"state {key!r} of parameter {index} is a {type(value).__name__}, {_CANNOT_BE_PART}"
                )
            if start == 0:
                form.append((key, type(key), "value", None, None))
            continue
        if (odd := _oddity(value)) is not None:
            sparse = _FOR_SPARSE_GRADS if value.layout is not torch.strided else ""
            raise StateDictError(
                f"state {key!r} of parameter {index} is {odd}, not a dense tensor with values, {_KEEP_DENSE}{sparse}"
            )
        shape = value.shape
        if key in BASES and value.dtype in INT16:
            form.append((key, type(key), "blocks", value.dtype, None))
        elif shape and not whole_params and shape == part.shape:
            form.append((key, type(key), "slice", value.dtype, None))
        elif start == 0:
            form.append((key, type(key), "inline" if value.numel() <= _INLINE_NUMEL else "tensor", value.dtype, shape))
    return tuple(form)


def _forms_of(
    states: Mapping[int, Mapping[str, Any]],
    parts: Mapping[int, Tensor],
    starts: Mapping[int, int],
    *,
    whole_params: bool,
) -> Iterator[tuple[int, _Sent]]:
    """Yield :func:`_sent_of` each slice's state, together for those of tensors of the slice's shape and of scalars."""
    likes = [parts[index] for index in states]
    apart = whole_params or not all(map(Tensor.dim, likes))  # state of a 0-dim parameter looks like a scalar
    columns = (None if apart else columns_of_alike([*states.values()])) or {}
    shaped = {key: dimensions_of(column, likes) for key, column in columns.items() if key not in BASES}
    if not columns or len(shaped) < len(columns) or None in shaped.values():
        for index, state in states.items():
            yield index, _sent_of(index, state, parts[index], starts[index], whole_params=whole_params)
        return
    dtypes = {key: column[0].dtype for key, column in columns.items()}
    rest = tuple((key, str, "slice", dtypes[key], None) for key in columns if shaped[key])
    first = tuple(
        (key, str, "slice" if shaped[key] else "inline", dtypes[key], None if shaped[key] else torch.Size())
        for key in columns
    )
    for index in states:
        yield index, rest if starts[index] else first


def batches_of(
    states: Mapping[int, Mapping[str, Any]],
    parts: Mapping[int, Tensor],
    starts: Mapping[int, int],
    *,
    whole_params: bool,
) -> list[Batch]:
    """Return what a rank lists of its slices' states. Small tensors are read for it.

    Args:
        parts: what is stepped for each slice. starts: where each begins in its parameter. whole_params: slices are
            whole.

    Raises:
        StateDictError: a value cannot be sent. StorageFailed: a small one cannot be read.
    """
    alike: dict[_Sent, list[int]] = {}
    for index, form in _forms_of(states, parts, starts, whole_params=whole_params):
        alike.setdefault(form, []).append(index)
    return [
        Batch(
            params,
            [starts[index] for index in params],
            [parts[index].numel() for index in params],
            [_field(key, kind, dtype, shape, params, states) for key, _, kind, dtype, shape in form],
        )
        for form, params in alike.items()
        if form
    ]


def _field(
    key: str,
    kind: str,
    dtype: torch.dtype | None,
    shape: torch.Size | None,
    params: Sequence[int],
    states: Mapping[int, Mapping[str, Any]],
) -> Field:
    values: Any = None
    if kind == "value":
        values = [states[index][key] for index in params]
    elif kind == "inline":
        tensors = [states[index][key] for index in params]
        require_readable(*tensors)
        devices = {tensor.device for tensor in tensors}
        with torch.no_grad():
            together = torch.stack(tensors if len(devices) == 1 else [tensor.cpu() for tensor in tensors]).cpu()
        values = tensor_bytes(together.contiguous()).hex()
    return Field(key, kind, "" if dtype is None else dtype_name(dtype), list(shape or ()), values)


def listing(batches: Sequence[Batch]) -> bytes:
    """Return batches as JSON."""
    return json.dumps(batches).encode()


def listed(payload: bytes) -> list[Batch]:
    """Return the batches in a :func:`listing`."""
    batches = json.loads(payload)
    return [Batch(params, starts, numels, [Field(*f) for f in fields]) for params, starts, numels, fields in batches]


def small_values(batch: Batch, field: Field) -> list[Any]:
    """Return the numbers, texts or tensors that traveled inside the listing, one per member."""
    if field.kind == "value":
        return list(field.values)
    shape, dtype = (len(batch.params), *field.shape), torch_dtype(field.dtype)
    if not math.prod(shape):
        return [torch.empty(field.shape, dtype=dtype, device="cpu") for _ in batch.params]
    apart: Any = torch.unbind_copy  # which torch's types take for a procedure
    return list(apart(bytes_tensor(bytes.fromhex(field.values)).view(dtype).view(shape)))


def packets(batches: Iterable[Batch]) -> Iterator[Packet]:
    """Yield what travels in one message each, in this order: part of one member's elements, or those of small ones."""
    for batch in batches:
        for field in filter(lambda field: field.travels, batch.fields):
            yield from _packets_of(batch, field)


def _packets_of(batch: Batch, field: Field) -> Iterator[Packet]:
    itemsize = torch_dtype(field.dtype).itemsize
    most, small = _CHUNK_BYTES // itemsize, _SMALL_BYTES // itemsize
    numels = batch.numels_of(field)
    first = together = 0
    for member, numel in enumerate(numels):
        large = numel > small
        if together and (large or together + numel > most):
            yield Packet(batch, field, first, member, _ALL, together)
        if large or together + numel > most:
            first, together = member, 0
        if not large:
            together += numel
            continue
        for start in range(0, numel, most):
            span = slice(start, min(start + most, numel))
            yield Packet(batch, field, member, member + 1, span, span.stop - span.start)
        first = member + 1
    if together:
        yield Packet(batch, field, first, len(numels), _ALL, together)


def packets_apart(batch: Batch) -> Iterator[Packet]:
    """Yield what travels of a batch, one packet per value."""
    for field in filter(lambda field: field.travels, batch.fields):
        for member, numel in enumerate(batch.numels_of(field)):
            yield Packet(batch, field, member, member + 1, _ALL, numel)


def runs_of(state: LocalState | FrozenState, packet: Packet) -> list[Tensor]:
    """Return the elements of a message, where they live.

    Raises:
        StorageFailed: they are a file's, and cannot be read.
    """
    runs = [packet.part(run) for run in state.runs(packet)]
    require_readable(*runs)
    return runs


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


@without_collection()
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
    return torch.zeros(packet.numel, dtype=packet.dtype, device="cpu")
