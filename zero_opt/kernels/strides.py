"""What strides say about where a tensor's elements lie."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

from ..system.extension import native
from ..system.placing import READER

dtype_of, shape_of = attrgetter("dtype"), attrgetter("shape")


def is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Return whether the elements fill one contiguous run of memory, each exactly once, in some order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def overlaps(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Return whether two elements may share memory (an expanded tensor, or strides that interleave)."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def run_of(values: Tensor) -> Tensor:
    """Return the elements of a dense tensor in 1-D, as they lie in memory. One of one element may have any strides."""
    return values.as_strided((values.numel(),), (1,))


def resolved(values: Tensor) -> Tensor:
    """Return a tensor whose memory has its values: the same one, unless torch conjugates or negates what it reads."""
    return values.resolve_conj().resolve_neg() if values.is_conj() or values.is_neg() else values


def dimensions_of(values: list[Tensor], likes: list[Tensor]) -> bool | None:
    """Return whether values have dimensions, all those of their ``likes``; ``False`` if none has any.

    ``None`` of other values, of values that differ in dtype or are not dense, row by row, in host memory, and without
    native code, which reads them all in one call.
    """
    try:
        return native.dimensions(READER, values, likes)
    except Exception:  # as in placing_of()
        return None


def joined_bytes(values: list[Tensor]) -> bytes:
    """Return the bytes, one after the other, of values whose :func:`dimensions_of` native code has read."""
    return native.joined_bytes(READER, values)


def joined_scalars(values: list[Tensor]) -> Tensor:
    """Return one tensor of values without dimensions, whose :func:`dimensions_of` native code has read."""
    return torch.frombuffer(bytearray(joined_bytes(values)), dtype=values[0].dtype)
