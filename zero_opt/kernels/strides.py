"""What strides say about where a tensor's elements lie."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

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


def placing_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return address, dtype and strides of tensors, which tell whether any was re-pointed; a list of each."""
    return [list(map(Tensor.data_ptr, tensors)), list(map(dtype_of, tensors)), list(map(Tensor.stride, tensors))]
