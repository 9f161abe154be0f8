"""Host memory that an accelerator reads and writes by itself, while the processor does something else.

torch's own allocator of page-locked memory rounds sizes up to powers of two, and keeps what is freed. So ordinary
memory is registered with the device's runtime; torch's allocator serves devices whose runtime offers no such call.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .devices import HOST, pins, runtime_of
from .log import log
from .shared_memory import memory_errors, page_aligned, require_memory

_PORTABLE = 1  # cudaHostRegisterPortable: for every device


class HostMemory:
    """Host memory for copies to and from a device, page-locked as far as the device's runtime allows.

    Copies are right without page-locking too; they hold up the processor then. The pages are unlocked by
    :meth:`release`, or when the object is collected; neither at the interpreter's exit nor in a forked process.

    Attributes:
        bytes: the memory, uint8.
        refused: whether the runtime has refused to lock it, so that a thread which asks for a copy is held up by it.
            ``False`` too where the runtime offers no such call.

    Args:
        memory: whole pages, from the start of a page on, unless the device is the host.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self.bytes = memory
        self._events: list[Any] = []
        locked = _lock(memory, device)
        self.refused = not locked and runtime_of(device) is not None
        # The finalizer holds the memory: it stays mapped until no copy needs it and its pages are unlocked.
        self.release = weakref.finalize(self, _release, os.getpid(), memory, device, locked, self._events)
        self.release.atexit = False

    def used(self, event: Any) -> None:
        """Let the release wait for an event that follows a copy; ``None``, the host's event, is over already."""
        if event is not None:
            self._events[:] = [earlier for earlier in self._events if not earlier.query()]
            self._events.append(event)

    @property
    def under_way(self) -> Sequence[Any]:
        """Events after copies, of which some are not over yet."""
        return tuple(self._events)


def host_memory(nbytes: int) -> HostMemory:
    """Return zeros in pageable memory, of whole pages."""
    return HostMemory(_whole_pages(nbytes), HOST)


def pinned_memory(nbytes: int, device: torch.device) -> HostMemory:
    """Return zeros in memory, of whole pages, that is page-locked for a device where that can be had.

    Raises:
        OutOfMemory: there is not enough host memory.
    """
    if runtime_of(device) is None and pins(device):
        whole = page_aligned(max(nbytes, 1))
        try:
            return HostMemory(torch.zeros(whole, dtype=torch.uint8, device=HOST, pin_memory=True), HOST)
        except RuntimeError as error:
            log.warning("torch does not lock %d bytes of host memory for %s: %s", nbytes, device, error)
    return HostMemory(_whole_pages(nbytes), device)


def _whole_pages(nbytes: int) -> Tensor:
    """Return zeros that forked processes share: pages that were copied at a fork would no longer be the device's."""
    nbytes = page_aligned(max(nbytes, 1))
    require_memory(nbytes, "CPUOffload")
    with memory_errors(nbytes, "CPUOffload"):
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _lock(memory: Tensor, device: torch.device) -> bool:
    """Lock all of the memory in one call; return whether the runtime does.

    In one: a runtime refuses copies that begin in one locked range and end outside it, in another one too.
    """
    runtime = runtime_of(device)
    if runtime is None:
        return False
    with torch.accelerator.device_index(device.index):  # the call makes a context on the current device
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))
        if error:
            _clear_error(device)
            log.warning(
                "%s does not lock %d bytes of host memory (error %d): copies wait", device, memory.numel(), error
            )
    return not error


def _release(pid: int, memory: Tensor, device: torch.device, locked: bool, events: list[Any]) -> None:
    """Unlock the memory once the copies are over; it stays mapped until then."""
    if os.getpid() != pid:
        return
    for event in events:
        with contextlib.suppress(RuntimeError):  # the device has failed, and copies nothing any more
            event.synchronize()
    if locked:
        with torch.accelerator.device_index(device.index):
            if int(runtime_of(device).cudaHostUnregister(memory.data_ptr())):
                _clear_error(device)


def _clear_error(device: torch.device) -> None:
    """Launch a kernel: the runtime keeps the error of a refused call for the next launch, whose check clears it.

    torch binds no ``cudaGetLastError``.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device, dtype=torch.float32)
