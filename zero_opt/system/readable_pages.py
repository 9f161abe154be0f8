"""Checks whether pages of memory that are a file's can be read or written."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from torch import Tensor

from ..errors import StorageFailed, mib

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_POPULATE_READ, MADV_POPULATE_WRITE, since Linux 5.14
_UNREADABLE = (errno.EFAULT, 133)  # EHWPOISON, which errno does not name everywhere
# The number of tensors from which on to look up where files are mapped, which takes 1 ms. madvise() takes 1 us a call.
_LOOK_UP_FROM = 1000


@functools.cache
def _madvise() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def require_readable(*runs: Tensor) -> None:
    """Raise StorageFailed if memory of a tensor cannot be read; a process that touched it would be killed (SIGBUS).

    The check reads the memory, so check a large tensor in parts. Kernels before 5.14 cannot tell.

    Args:
        runs: contiguous, on any device. Of 1,000 or more, only those in mapped files are checked.
    """
    remedy = "if the disk does not come back, load a checkpoint into a new optimizer"
    for start, nbytes in _pages_of(runs if len(runs) < _LOOK_UP_FROM else _in_files(runs)):
        _populate(start, nbytes, _POPULATE_READ, "read from", remedy)


def _in_files(runs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in host memory whose first byte is a file's; all, where that is not known."""
    here = [run for run in runs if run.is_cpu]
    try:
        mappings = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_bytes().split(b"\n") if line]
    except OSError:
        return here
    edges = list[int]()  # each file's first address, and that after its last one, ascending
    for addresses, _, _, _, inode, *_ in mappings:
        if inode != b"0":
            edges += (int(edge, 16) for edge in addresses.split(b"-"))
    return [run for run, at in zip(here, map(Tensor.data_ptr, here)) if bisect_right(edges, at) % 2]


def _pages_of(runs: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of the pages that tensors in host memory lie on, those next to each other together."""
    page, here = mmap.PAGESIZE, [run for run in runs if run.is_cpu]
    placed = zip(map(Tensor.data_ptr, here), map(attrgetter("nbytes"), here))
    start = stop = 0
    for first, last in sorted({(at // page, -(-(at + nbytes) // page)) for at, nbytes in placed if nbytes}):
        if first > stop:
            if start < stop:
                yield start * page, (stop - start) * page
            start = first
        stop = max(stop, last)
    if start < stop:
        yield start * page, (stop - start) * page


def require_writable(run: Tensor) -> bool:
    """Raise StorageFailed if memory of a tensor cannot be written; a process that wrote to it would be killed (SIGBUS).

    The pages are dirty after the check, with the bytes that they had: the file system has room for them.

    Args:
        run: contiguous, on any device.

    Returns:
        Whether that is known: kernels before 5.14 cannot tell.
    """
    remedy = "make room if the disk is full; if it does not come back, load a checkpoint into a new optimizer"
    pages = _pages_of([run])
    return all(_populate(start, nbytes, _POPULATE_WRITE, "written to", remedy) for start, nbytes in pages)


def _populate(start: int, nbytes: int, advice: int, what: str, remedy: str) -> bool:
    if not _madvise()(start, nbytes, advice):
        return True
    if ctypes.get_errno() in _UNREADABLE:
        raise StorageFailed(f"{mib(nbytes)} of optimizer state cannot be {what} the file that holds it; {remedy}")
    return False
