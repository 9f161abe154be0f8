"""Memory that processes of one host share: anonymous, sealed, gone with the last process that maps it."""

from __future__ import annotations

import mmap
import os
import sys
import weakref

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


def page_aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Arena:
    """A memfd mapped into this process.

    A memfd is bounded by the memory cgroup alone, not by the size of /dev/shm, and a killed process leaves none behind.
    Pages are taken when first touched.

    Attributes:
        fd: file descriptor of the memory, which a peer opens as ``/proc/<pid>/fd/<fd>``.
        bytes: the whole arena as a uint8 tensor.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Arena:
        """A new arena of at least ``nbytes``, all zero, sealed against changing its size.

        Raises:
            OSError: there is no such memory to be had.
        """
        if sys.platform != "linux":
            raise OSError(f"there is no memfd on {sys.platform}")
        import fcntl  # not on every platform

        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, page_aligned(nbytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(fd)
            raise
        return cls(fd)

    @classmethod
    def of_peer(cls, pid: int, fd: int) -> Arena:
        """The arena that process ``pid`` has open as ``fd``.

        Raises:
            OSError: it cannot be opened from here (another host or container, or not permitted).
        """
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    @property
    def address(self) -> int:
        """Where the arena is mapped in this process."""
        return self.bytes.data_ptr()

    def view(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements from byte ``start`` on."""
        return self.bytes[start : start + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Close the descriptor. The mapping ends when the last tensor over it is gone."""
        self._close()
