"""What strides say about where a tensor's elements lie."""

from __future__ import annotations

import torch


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
