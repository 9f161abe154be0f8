"""Arrays of more than 2^31 elements: every page of the address space that they take is the same few of memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from test.native.kernels import HYPERS, arrays, same_bits, step
from zero_opt import _native

PIECE = 1 << 21  # bytes
TAIL = 1000
NUMEL = 2**31 + TAIL
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


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_elements_beyond_two_to_the_31() -> None:
    roles = ("param", "exp_avg", "exp_avg_sq")
    (param, grad, exp_avg, exp_avg_sq, _), nbytes = arrays(TAIL), 4 * NUMEL
    with repeated(nbytes) as a, repeated(nbytes) as b, repeated(nbytes) as c, repeated(nbytes) as d:
        tails = [last(address, nbytes) for address in (a, b, c, d)]
        for tail, values in zip(tails, (param, exp_avg, exp_avg_sq, grad)):
            tail.copy_(values)
        run = _native.UpdateRun(NUMEL, dict(zip(roles, (a, b, c))), step=3.0)
        assert _native.update_step([(_native.Hypers("adam", **HYPERS), [run], [d])], threads=2) == 0
        written = dict(zip(roles, (param, exp_avg, exp_avg_sq)))
        step(written, grad)
        assert all(same_bits(tail, written[role]) for tail, role in zip(tails, roles))
        squares, bad = _native.grad_sum([(d, "float32", NUMEL)], threads=2)
        assert bad == 0 and squares == pytest.approx(float(grad.double().square().sum()), rel=1e-12)
        del tails
