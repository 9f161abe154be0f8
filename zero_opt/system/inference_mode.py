"""Leaving ``torch.inference_mode()``: a tensor that is made in it has no version counter, and cannot be written later.

Values that the library makes outlive the call in which they are made, so calls of users and hooks leave the mode first.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter

import torch
from torch import Tensor

_UNCHANGED = nullcontext()
_version_getter = attrgetter("_version")


def outside_inference_mode() -> AbstractContextManager[None]:
    """Return a context in which tensors are made as outside ``torch.inference_mode()``; it costs nothing out there."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _UNCHANGED


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; 0 if it was made in inference mode, where torch counts no writes."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Collection[Tensor]) -> list[int]:
    """Return the version of each tensor; see :func:`version_of`."""
    try:
        return list(map(_version_getter, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))
