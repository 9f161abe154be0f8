"""Equality to the bit, of tensors and of nested state; copies to compare with."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_INT_OF_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(a: object, b: object, where: str = "") -> None:
    """Fail unless `a` and `b` have the same structure, shapes, dtypes and bits.

    NaN equals the same NaN and -0.0 differs from 0.0, because it is the bits that are compared. The message
    names the first few places that differ, how many elements do, and by how much.
    """
    found = list(bitwise_difference(a, b, where))
    if found:
        shown = "\n  ".join(found[:8])
        more = f"\n  and {len(found) - 8} more" if len(found) > 8 else ""
        raise AssertionError(f"not bit-identical:\n  {shown}{more}")


def copies_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return copies of a model's parameters as they are."""
    return [param.detach().clone() for param in model.parameters()]


def bitwise_difference(a: object, b: object, where: str = "") -> Iterator[str]:
    """One line per place where `a` and `b` are not the same to the bit."""
    at = where or "value"
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        line = _tensor_difference(a.detach(), b.detach())
        if line:
            yield f"{at}: {line}"
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from _mapping_difference(a, b, where)
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        yield from _sequence_difference(a, b, where)
    elif isinstance(a, float) and isinstance(b, float):
        if struct.pack("d", a) != struct.pack("d", b):
            yield f"{at}: {a!r} and {b!r}"
    elif type(a) is not type(b) or a != b:
        yield f"{at}: {a!r} and {b!r}"


def _mapping_difference(a: Mapping[Any, object], b: Mapping[Any, object], where: str) -> Iterator[str]:
    for key in a.keys() | b.keys():
        if key not in a or key not in b:
            yield f"{where}[{key!r}]: only in the {'first' if key in a else 'second'}"
        else:
            yield from bitwise_difference(a[key], b[key], f"{where}[{key!r}]")


def _sequence_difference(a: Sequence[object], b: Sequence[object], where: str) -> Iterator[str]:
    if len(a) != len(b):
        yield f"{where or 'value'}: lengths {len(a)} and {len(b)}"
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        yield from bitwise_difference(left, right, f"{where}[{index}]")


def _tensor_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return f"{a.dtype} {tuple(a.shape)} on {a.device} and {b.dtype} {tuple(b.shape)} on {b.device}"
    if a.layout != torch.strided or b.layout != torch.strided:
        return _sparse_difference(a, b)
    left, right = _bits(a), _bits(b)
    differ = left != right
    count = int(differ.sum())
    if count == 0:
        return ""
    first = int(differ.nonzero()[0])
    text = f"{count} of {left.numel()} elements differ, the first at flat index {first}"
    if a.dtype.is_floating_point or a.dtype.is_complex:
        text += f"; max {_max_ulp(left, right):.0f} ulp, max |a - b| {_max_abs(a, b):.3g}"
    return text


def _sparse_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.layout != b.layout or a.layout != torch.sparse_coo:
        return f"layouts {a.layout} and {b.layout}"
    a, b = a.coalesce(), b.coalesce()
    indices = _tensor_difference(a.indices(), b.indices())
    return f"indices: {indices}" if indices else _tensor_difference(a.values(), b.values())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers in a flat tensor; a complex number is two elements."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().contiguous().view(_INT_OF_ITEMSIZE[tensor.element_size()]).flatten()


def _max_ulp(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((_ordered(left) - _ordered(right)).abs().max())


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Sign-magnitude bits as numbers that count representable values from zero up and down."""
    width = 8 * bits.element_size()
    wide = bits.to(torch.int64)
    if width == 8:  # the only unsigned view
        wide = torch.where(wide >= 128, wide - 256, wide)
    magnitude = wide & ((1 << (width - 1)) - 1)
    # In double, because the distance between two float64 values need not fit in an int64.
    return torch.where(wide < 0, -magnitude, magnitude).double()


def _max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    difference = (a.to(wide) - b.to(wide)).abs().flatten()
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
