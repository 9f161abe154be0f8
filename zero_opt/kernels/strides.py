"""What strides say about where a tensor's elements lie."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..system.extension import native

dtype_of, shape_of = attrgetter("dtype"), attrgetter("shape")
# By which native code reads tensors: DLPack's C exchange interface.
_READER: Any = getattr(Tensor, "__dlpack_c_exchange_api__", None)


def _lies_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


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


def placing_of(tensors: list[Tensor]) -> tuple[object, object]:
    """Return the addresses of tensors, and how their elements lie: both are equal as long as none is re-pointed.

    How elements lie is device, dtype, shape and strides.
    """
    try:
        return native.placing(_READER, tensors)  # a tenth of the time
    except Exception:  # no native extension, or tensors of a kind that DLPack does not have
        return list(map(Tensor.data_ptr, tensors)), list(map(_lies_of, tensors))


def dimensions_of(values: list[Tensor], likes: list[Tensor]) -> bool | None:
    """Return whether values have dimensions, all those of their ``likes``; ``False`` if none has any.

    ``None`` of other values, of values that differ in dtype or are not dense, row by row, in host memory, and without
    native code, which reads them all in one call.
    """
    try:
        return native.dimensions(_READER, values, likes)
    except Exception:  # as in placing_of()
        return None


def joined_bytes(values: list[Tensor]) -> bytes:
    """Return the bytes, one after the other, of values whose :func:`dimensions_of` native code has read."""
    return native.joined_bytes(_READER, values)
