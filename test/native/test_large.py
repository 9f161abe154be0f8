"""Arrays of more than 2^31 elements: every page of the address space that they take is the same few of memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from test.native.kernels import ADAGRAD, HYPERS, LION, SGD, arrays, same_bits, step_of
from zero_opt import _native

PIECE = 1 << 21  # bytes
TAIL = 1000
NUMEL = 2**31 + TAIL
# The kernel's name, hyperparameters, and the arrays of state.
UPDATES: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "adam": ("adam", HYPERS, ("exp_avg", "exp_avg_sq")),
    "adagrad": ("adagrad", ADAGRAD, ("sum",)),
    "lion": ("lion", LION, ("exp_avg",)),
    "sgd": ("sgd", SGD, ("momentum_buffer",)),
    "without momentum": ("sgd", {**SGD, "momentum": 0}, ()),
}
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MAP_FIXED, MAP_NORESERVE, MAP_POPULATE = 0x10, 0x4000, 0x8000


@contextmanager
def repeated(nbytes: int) -> Iterator[int]:
    """The address of ``nbytes`` that are one zeroed piece of memory again and again, the last piece being its own."""
    pieces = -(-nbytes // PIECE)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    fd = os.memfd_create("repeated")
    os.ftruncate(fd, 2 * PIECE)
    address = libc.mmap(None, pieces * PIECE, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    try:
        for i in range(pieces):
            offset = PIECE if i == pieces - 1 else 0
            flags = mmap.MAP_SHARED | MAP_FIXED | MAP_POPULATE
            assert libc.mmap(address + i * PIECE, PIECE, protection, flags, fd, offset) == address + i * PIECE
        yield address
    finally:
        libc.munmap(address, pieces * PIECE)
        os.close(fd)


def last(address: int, nbytes: int) -> torch.Tensor:
    """The last fp32 elements of an array there, as a tensor on that memory."""
    memory = (ctypes.c_float * TAIL).from_address(address + nbytes - 4 * TAIL)
    return torch.frombuffer(memory, dtype=torch.float32)


needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


@contextmanager
def large(values: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Addresses of arrays of zeros that end with these fp32 values, and the values there."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(repeated(4 * NUMEL)) for _ in values]
        tails = [last(address, 4 * NUMEL) for address in addresses]
        for tail, value in zip(tails, values, strict=True):
            tail.copy_(value)
        yield addresses, tails
        del tails


@needs_memfd
@pytest.mark.parametrize("case", UPDATES)
def test_steps_of_elements_beyond_two_to_the_31(case: str) -> None:
    """Zeros stay zeros under every update, however often they are stepped."""
    update, hypers, roles = UPDATES[case]
    param, grad, *_, positive, other = arrays(TAIL)
    written = dict(zip(("param", *roles), (param, positive, other)))
    with large([*written.values(), grad]) as (addresses, tails):
        run = _native.UpdateRun(NUMEL, dict(zip(written, addresses)), step=3.0)
        assert _native.update_step([(_native.Hypers(update, **hypers), [run], addresses[-1:])], threads=2) == 0
        before = param.clone()
        step_of(update, hypers, written, grad)
        assert all(same_bits(tail, written[role]) for tail, role in zip(tails, written))
        assert not same_bits(param, before)


@needs_memfd
def test_sums_of_elements_beyond_two_to_the_31() -> None:
    grad = arrays(TAIL)[1]
    with large([grad]) as ((address,), _):
        squares, bad = _native.grad_sum([(address, "float32", NUMEL)], threads=2)
        assert bad == 0 and squares == pytest.approx(float(grad.double().square().sum()), rel=1e-12)
