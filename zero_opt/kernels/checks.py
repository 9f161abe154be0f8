"""Checks of tensors before their addresses are taken.

Tensors reach the kernel as bare addresses, so everything that could make an address mean something else (device,
dtype, layout, overlap, a missing storage) is checked here, before anything is written.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from ..errors import ConfigError, ConfigTypeError, StateDictError, StateDictTypeError, UnsupportedParam, quoted
from ..field_checks import plain_numbers
from ..system.extension import native
from .strides import contiguous_strides, dimensions_of, is_dense, joined_bytes, overlaps

FLOAT32 = (torch.float32,)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint8: "uint8",
}
# In fp32, in which steps are counted.
_MOST_STEPS = torch.finfo(torch.float32).max


def require_number(label: str, value: object) -> None:
    """Raise ConfigError or ConfigTypeError unless ``value`` is a number, or a tensor of one; NaN is none."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            form = f"{value.dtype} of shape {tuple(value.shape)}{' on the meta device' if value.is_meta else ''}"
            raise ConfigTypeError(f"{label} must be a number, got a tensor, {form}")
        number: Any = value.item() if value.is_cpu else 0.0  # elsewhere it would have to be waited for
    elif isinstance(value, Real):
        number = value
    else:
        raise ConfigTypeError(f"{label} must be a number, got {quoted(value)}")
    if number != number:
        raise ConfigError(f"{label} is NaN")


def require_numbers(label: str, values: object, count: int) -> None:
    """Raise as :func:`require_number` unless ``values`` is a tuple, list or array of so many numbers."""
    numbers = plain_numbers(values)
    if not isinstance(numbers, (tuple, list)) or len(numbers) != count:
        raise ConfigTypeError(f"{label} must be {count} numbers, got {quoted(values)}")
    for value in numbers:
        require_number(label, value)


class NativeIsas(NamedTuple):
    """Names of instruction sets, as ``ZERO_OPT_ISA`` takes them.

    Attributes:
        chosen: the one whose kernels are used. processor: the fastest that the processor runs.
        compiled: those that kernels are built for, slowest first.
    """

    chosen: str
    processor: str
    compiled: Sequence[str]


def native_isas() -> NativeIsas:
    """Return which kernels are used, and which could be.

    Raises:
        NativeUnavailable: the native extension is not built.
    """
    return NativeIsas(native.isa(), native.processor_isa(), native.compiled_isas())


def check_tensor(
    what: str, tensor: Any, shape: torch.Size | None = None, dtypes: tuple[torch.dtype, ...] = FLOAT32
) -> None:
    """Raise UnsupportedParam or ConfigError, naming ``what``, unless the kernel can work on this tensor.

    Args:
        what: the tensor's name in the message.
        tensor: should be a strided CPU tensor whose elements do not overlap.
        shape: the shape that it must have, if any.
        dtypes: the dtypes that it may have.
    """
    if (
        type(tensor) in (Tensor, Parameter)
        and tensor.dtype in dtypes
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and (shape is None or tensor.shape == shape)
        and (tensor.data_ptr() or not tensor.numel())
    ):
        return  # the usual case, at a third of the price
    if not isinstance(tensor, Tensor):
        raise UnsupportedParam(f"{what} must be a torch.Tensor, got {type(tensor).__name__}")
    if is_lazy(tensor):
        raise UnsupportedParam(f"{what} is not initialized yet; run a forward pass first")
    if tensor.layout is not torch.strided:
        raise UnsupportedParam(f"{what} must be dense, got layout {tensor.layout}; SparseAdam takes sparse gradients")
    if not tensor.is_cpu:
        raise UnsupportedParam(f"{what} must be on the CPU, got device {tensor.device}")
    if tensor.dtype not in dtypes:
        raise UnsupportedParam(f"{what} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if shape is not None and tensor.shape != shape:
        raise ConfigError(f"{what} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if lacks_memory(tensor):
        raise UnsupportedParam(f"{what} has no memory of its own ({type(tensor).__name__}); pass the local tensor")
    check_reach(what, tensor)
    if tensor.numel() and overlaps(tensor.shape, tensor.stride()):
        raise ConfigError(
            f"{what} has elements that may share memory (shape {tuple(tensor.shape)}, stride {tensor.stride()}); "
            "pass a clone"
        )


def _reach(tensor: Tensor) -> int:
    """Return the bytes from the first element to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def reaches_beyond(tensor: Tensor) -> bool:
    """Return whether the storage was made smaller than the tensor over it."""
    if not tensor.numel():  # a view of nothing may begin anywhere
        return False
    reach = tensor.nbytes if tensor.is_contiguous() else _reach(tensor)
    return tensor.storage_offset() * tensor.itemsize + reach > tensor.untyped_storage().nbytes()


def lacks_memory(tensor: Tensor) -> bool:
    """Return whether a strided tensor has elements, but none in memory of its own, as a wrapper of other tensors has.

    Nothing may be read or written at its address, which is what a view of it begins at: a few bytes from 0.
    """
    return tensor.numel() > 0 and tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize


def has_memory(tensor: Tensor) -> bool:
    """Return whether all elements of a strided tensor lie in memory of its own."""
    return not lacks_memory(tensor) and not reaches_beyond(tensor)


@functools.cache
def has_values(dtype: torch.dtype) -> bool:
    """Return whether torch can cast elements of a dtype. Those of some are bits without a value."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(torch.complex128)
    except RuntimeError:
        return False
    return True


def oddity(value: Tensor) -> str | None:
    """Return what a tensor is that is not dense, or has no elements in memory of a dtype that torch can cast."""
    if (
        type(value) is Tensor
        and value.dtype in DTYPE_NAMES
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_nested
        and value.is_contiguous()
        and value.data_ptr()
        and value.storage_offset() * value.itemsize + value.nbytes <= value.untyped_storage().nbytes()
    ):
        return None  # the usual case, at a third of the price
    if value.is_nested or value.is_quantized:
        return "nested" if value.is_nested else "quantized"
    if value.is_meta or value.layout is not torch.strided:
        return "on the meta device" if value.is_meta else str(value.layout)
    if is_lazy(value) or not has_memory(value):
        return f"a {type(value).__name__} without memory of its own"
    return None if has_values(value.dtype) else str(value.dtype)


def may_be_count(step: Any) -> bool:
    """Return whether a loaded value can be a step count: if it is a number, a real one that fp32 can hold.

    What is no single number is for others to check.
    """
    if isinstance(step, Tensor):
        if step.is_meta or step.is_nested or step.numel() != 1:
            return True
        if step.is_complex() or step.dtype is torch.bool or not has_values(step.dtype):
            return False
        step = step.item()
    if isinstance(step, (bool, complex)):
        return False
    return not isinstance(step, (int, float)) or 0 <= step <= _MOST_STEPS


def is_number_of_steps(step: Any) -> bool:
    """Return whether a value is a step count: one number, or a tensor of one."""
    return _is_real(step) and may_be_count(step)


def _is_real(step: Any) -> bool:
    """Return whether a value is one real number, or a tensor of one; a bool is none."""
    if isinstance(step, Tensor):
        return step.numel() == 1 and not (step.is_meta or step.is_complex() or step.dtype is torch.bool)
    return isinstance(step, (int, float)) and not isinstance(step, bool)


def require_count(what: str, step: Any) -> None:
    """Raise StateDictError, naming ``what``, unless a value is a step count; StateDictTypeError if it is no number."""
    if not is_number_of_steps(step):
        kind = StateDictError if _is_real(step) else StateDictTypeError
        raise kind(f"{what} must be a number of steps, got {quoted(step)}")


def are_plain_counts(values: list[Any]) -> bool:
    """Return whether all are step counts in the kernel's own form, fp32 in host memory. One native call reads them."""
    if not values:
        return True
    if dimensions_of(values, values) is not False or values[0].dtype is not torch.float32:
        return False
    return all(0 <= count <= _MOST_STEPS for count in {*array("f", joined_bytes(values))})


def require_counts(counts: list[Any], name_of: Callable[[int], str]) -> None:
    """Raise StateDictError, naming the first that is none, unless all values are step counts.

    Args:
        name_of: returns what messages call the param at a position.
    """
    if not are_plain_counts(counts):
        for at, count in enumerate(counts):
            if not is_number_of_steps(count):
                require_count(f"step of {name_of(at)}", count)


def check_reach(what: str, tensor: Tensor) -> None:
    """Raise ConfigError if the storage was made smaller than the tensor over it."""
    if reaches_beyond(tensor):
        raise ConfigError(f"{what} reaches beyond its storage of {tensor.untyped_storage().nbytes()} bytes")


def check_apart(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ConfigError, naming both, if two tensors share an element: threads would step it at the same time."""
    pair = shared_pair([tensor for _, tensor in named])
    if pair is not None:
        name, other_name = (named[at][0] for at in pair)
        raise ConfigError(f"{name} and {other_name} share memory; pass one of them, or clones")


def shared_pair(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the positions of two tensors that have an element in common, if any have."""
    lying = [at for at, tensor in enumerate(tensors) if tensor.numel() and not lacks_memory(tensor)]
    places = {at: (str(tensors[at].device), tensors[at].data_ptr()) for at in lying}
    in_memory = sorted(places, key=places.__getitem__)
    for number, at in enumerate(in_memory):
        device, start = places[at]
        for later in range(number + 1, len(in_memory)):
            other = in_memory[later]
            if places[other] >= (device, start + _reach(tensors[at])):
                break
            if _share(tensors[at], tensors[other]):
                return at, other
    return None


def _share(first: Tensor, other: Tensor) -> bool:
    """Return whether two tensors that reach into each other's memory have an element in common; so in mixed sizes."""
    dense = all(is_dense(tensor.shape, tensor.stride()) for tensor in (first, other))
    if dense or first.itemsize != other.itemsize or (first.data_ptr() - other.data_ptr()) % first.itemsize:
        return True
    return bool(torch.isin(_addresses(first), _addresses(other)).any())


def _addresses(tensor: Tensor) -> Tensor:
    """Return the address of every element."""
    addresses = torch.tensor(tensor.data_ptr(), dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride()):
        addresses = (
            addresses[..., None] + torch.arange(size, device="cpu", dtype=torch.int64) * stride * tensor.itemsize
        )
    return addresses


def storage_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides in which a run covers this tensor: its own if they are dense, else row-major ones.

    So blocks of 8-bit moments are the same here and in shards.
    """
    if tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()):
        return tensor.stride()
    return contiguous_strides(tensor.shape)


def has_order(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether the tensor's bytes are its elements in the order of these strides."""
    if tensor.is_neg():
        return False  # a lazy negation: the bytes are not the values
    own = tensor.stride()
    return own == strides or all(a == b for a, b, size in zip(own, strides, tensor.shape) if size > 1)
