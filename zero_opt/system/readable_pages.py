"""Pages of memory that are a file's: whether they can be read, before somebody does."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

from ..errors import StorageFailed

_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
_UNREADABLE = (errno.EFAULT, 133)  # EHWPOISON, which errno does not name everywhere


@functools.cache
def _madvise() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def require_readable(run: Tensor) -> None:
    """Raise StorageFailed if memory of a tensor cannot be read; whoever touched it would be killed (SIGBUS).

    It is read by that, so a large tensor is better asked about in parts. Kernels before 5.14 cannot tell.

    Args:
        run: contiguous, on any device.
    """
    if not run.is_cpu or not run.numel():
        return
    start = run.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = run.data_ptr() + run.numel() * run.element_size() - start
    if _madvise()(start, nbytes, _POPULATE_READ) and ctypes.get_errno() in _UNREADABLE:
        raise StorageFailed(
            f"{nbytes / 2**20:.1f} MiB of optimizer state cannot be read from the file that holds it; if the disk does "
            "not come back, load a checkpoint"
        )
