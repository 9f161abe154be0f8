"""A tensor that wraps others, as quantized ones of libraries do: it has no memory of its own, and few operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class WrapperTensor(Tensor):
    """A tensor of a shape, over values that only :attr:`values` shows. A Parameter can be made of it."""

    values: Tensor

    @staticmethod
    def __new__(cls: type[WrapperTensor], values: Tensor) -> WrapperTensor:
        made: WrapperTensor = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return WrapperTensor(args[0].values)
        raise NotImplementedError(f"{func} of a WrapperTensor")


def wrapped(*shape: int, offset: int = 0) -> WrapperTensor:
    """Return a wrapper of ones, which begins so many elements after its storage does."""
    return WrapperTensor(torch.ones(torch.Size(shape).numel() + offset)[offset:].view(shape))
