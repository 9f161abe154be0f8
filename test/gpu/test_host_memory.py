"""Page-locked memory by the CUDA runtime: what it refuses leaves no error behind, and what it locks is let go."""

from __future__ import annotations

import ctypes
import logging
import mmap

import pytest
import torch

from test.gpu.processes import forked
from zero_opt.system.pinned_memory import HostMemory, pinned_memory

NBYTES = 16 * mmap.PAGESIZE
MIB = 1 << 20


def unmapped() -> torch.Tensor:
    """Return a tensor whose pages are not mapped any more; nobody may touch it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    memory = torch.frombuffer((ctypes.c_uint8 * NBYTES).from_address(address), dtype=torch.uint8)
    assert libc.munmap(address, NBYTES) == 0
    return memory


@forked
def test_a_refused_registration_leaves_no_error(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    with caplog.at_level(logging.WARNING, logger="zero_opt"):
        refused = HostMemory(unmapped(), device)
    assert "does not lock" in caplog.text
    assert float((torch.ones(1000, device=device) * 2).sum()) == 2000
    refused.release()
    assert float((torch.ones(1000, device=device) * 3).sum()) == 3000


@forked
def test_large_memory_is_locked_as_one_and_let_go() -> None:
    device = torch.device("cuda", 0)
    memory = pinned_memory(300 * MIB, device)
    assert memory.bytes.is_pinned()
    assert memory.bytes[-1:].is_pinned()
    copied = torch.full((300 * MIB,), 7, dtype=torch.uint8, device=device)
    memory.bytes[: copied.numel()].copy_(copied, non_blocking=True)
    memory.used(torch.cuda.current_stream().record_event())
    kept = memory.bytes
    memory.release()
    assert not kept.is_pinned()
    assert bool((kept[: copied.numel()] == 7).all())
