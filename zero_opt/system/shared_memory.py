"""Memory that processes of one host share: anonymous, sealed, gone with the last process that maps it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..errors import OutOfMemory, mib
from .failures import on_failure
from .limits import descriptor_errors, limit_in
from .log import log

PAGE = mmap.PAGESIZE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FAILED = ctypes.c_void_p(-1).value
# Linux's MAP_FIXED with MAP_PRIVATE and MAP_NORESERVE, or with MAP_SHARED.
_PRIVATE_THERE, _SHARED_THERE = 0x10 | 0x02 | 0x4000, 0x10 | 0x01
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def page_aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def above_stdio(fd: int) -> int:
    """Return a descriptor above 2 of the same open file, and close ``fd`` if that is not.

    Where standard streams are closed, new files get their numbers, and are replaced in processes started from here.
    """
    if fd > 2:
        return fd
    import fcntl  # not on every platform

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


CLOSED_BY_PROGRAM = "has the program closed zero_opt's file descriptors (os.closerange)?"


def close_own(fd: int) -> None:
    """Close a descriptor of ours. One that the program has closed, with others it does not know, is a warning."""
    try:
        os.close(fd)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        log.warning("the program has closed file descriptor %d, which is zero_opt's (os.closerange, say)", fd)


class _Mapping(NamedTuple):
    """Memory that is mapped from byte ``start`` of a file on; which file that is, as a descriptor may be used again."""

    address: int
    nbytes: int
    fd: int
    start: int
    file: tuple[int, int]

    @property
    def is_open(self) -> bool:
        """Whether the descriptor is still the file's."""
        try:
            return _file_of(self.fd) == self.file
        except OSError:
            return False

    def isolate(self) -> None:
        """Let what is written here from now on stay in this process.

        Where the system refuses the memory for that (``vm.overcommit_memory=2``), a write ends this process (SIGSEGV).
        """
        there = self.address, self.nbytes
        try:
            _mmap(*there, _PRIVATE_THERE, self.fd, self.start)
        except OSError:
            _mmap(*there, _SHARED_THERE, self.fd, self.start, mmap.PROT_READ)


# By address, those that this process has made.
_mappings: dict[int, _Mapping] = {}


def _isolate_all() -> None:
    """In a child that is forked, keep its writes from the memory of the process, and of the others that map it.

    A child of that one inherits what is mapped here, as all other memory.
    """
    for mapping in [*_mappings.values()]:
        if mapping.is_open:
            mapping.isolate()
            del _mappings[mapping.address]


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_isolate_all)


def _file_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _mmap(address: int | None, nbytes: int, flags: int, fd: int, start: int, protection: int = _READ_WRITE) -> int:
    where, length, offset = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_long(start)
    found: int | None = _libc.mmap(where, length, protection, flags, fd, offset)
    if found is None or found == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _unmap(address: int, nbytes: int) -> None:
    _mappings.pop(address, None)  # before another mapping can have the address; a fork has none
    _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def mapped_bytes(fd: int, nbytes: int, start: int = 0) -> Tensor:
    """Return bytes of an open file, from ``start`` on, mapped until the last tensor over them is gone.

    What a child writes there that is forked while ``fd`` is open stays in the child. What it has not written may still
    change with what other processes write.
    Python's ``mmap`` would keep a descriptor of its own open for as long.

    Raises:
        OSError: the system refuses.
    """
    address = _mmap(None, nbytes, mmap.MAP_SHARED, fd, start)
    _mappings[address] = _Mapping(address, nbytes, fd, start, _file_of(fd))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    unmap = weakref.finalize(memory, _unmap, address, nbytes)
    unmap.atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)  # holds the memory


class Arena:
    """A memfd mapped into this process.

    A memfd is bounded by the memory cgroup alone, not by the size of /dev/shm, and a killed process leaves none behind.
    Pages are taken when first touched.

    Attributes:
        fd: file descriptor of the memory, which a peer opens as ``/proc/<pid>/fd/<fd>``.
        bytes: the whole arena as a uint8 tensor.
        close: closes the descriptor. The mapping ends when the last tensor over it is gone.
    """

    _sealed_against: ClassVar[tuple[str, ...]] = ("F_SEAL_SHRINK", "F_SEAL_GROW")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.close = weakref.finalize(self, close_own, fd)
        self._map()

    def _map(self) -> None:
        """Map the arena as long as it is. Tensors over an older mapping of it share its memory."""
        self.bytes = mapped_bytes(self.fd, os.fstat(self.fd).st_size)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Self:
        """Return a new arena of at least ``nbytes``, all zero, sealed against resizing (growing ones: shrinking).

        Raises:
            OSError: there is no such memory to be had.
        """
        if sys.platform != "linux":
            raise OSError(f"there is no memfd on {sys.platform}")
        import fcntl  # not on every platform

        fd = above_stdio(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        with on_failure(partial(os.close, fd)):
            os.ftruncate(fd, page_aligned(nbytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, cls._seals())
        return cls(fd)

    @classmethod
    def of_peer(cls, pid: int, fd: int, nbytes: int, token: tuple[int, bytes]) -> Arena:
        """Map the arena, created with ``nbytes``, that process ``pid`` has open as ``fd``.

        In another process namespace ``pid`` is another process, so the file is checked before it is mapped. The
        arena's descriptor is closed: a rank maps the memory of many.

        Args:
            token: an offset in the arena, and the bytes that it holds there.

        Raises:
            OSError: the file cannot be opened (another host or container, or not permitted), or is not that arena.
        """
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith("/memfd:"):  # opening a device or a queue may have side effects
            raise OSError(f"what process {pid} has open there is no shared memory")
        opened = above_stdio(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        try:
            cls._require(opened, nbytes, token)
        except OSError as error:
            os.close(opened)
            raise OSError(f"what process {pid} has open there is not the memory that was offered: {error}") from error
        arena = cls(opened)
        arena.close()
        return arena

    @classmethod
    def _seals(cls) -> int:
        """Return the seals of a new arena, F_SEAL_SEAL included."""
        import fcntl  # not on every platform

        seals: int = sum(getattr(fcntl, seal) for seal in cls._sealed_against)
        return seals | fcntl.F_SEAL_SEAL

    @classmethod
    def _require(cls, fd: int, nbytes: int, token: tuple[int, bytes]) -> None:
        """Raise OSError unless a file is an arena of that size and holds the token. Maps nothing."""
        import fcntl  # not on every platform

        size, (start, held) = os.fstat(fd).st_size, token
        if size != page_aligned(nbytes):
            raise OSError(f"it has {size} bytes, not {page_aligned(nbytes)}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != cls._seals():
            raise OSError("its size may change")
        if os.pread(fd, len(held), start) != held:
            raise OSError("it is another rank's, or another program's")

    @property
    def address(self) -> int:
        """Where the arena is mapped in this process."""
        return self.bytes.data_ptr()

    def view(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of ``numel`` elements from byte ``start`` on."""
        return self.bytes[start : start + numel * dtype.itemsize].view(dtype)

    def unmap(self) -> None:
        """Release :attr:`bytes`. The mapping ends when the last tensor over it is gone."""
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


class GrowingArena(Arena):
    """An arena to which memory can be added at the end. What lies in it stays where it is."""

    _sealed_against = ("F_SEAL_SHRINK",)

    def grow(self, nbytes: int) -> None:
        """Make the arena at least ``nbytes`` long, zeros behind what there is, and map it anew.

        ``bytes`` and ``address`` change; tensors from before share memory with those from after.

        Raises:
            OSError: there is no such memory to be had.
        """
        if page_aligned(nbytes) > self.bytes.numel():
            if page_aligned(nbytes) > os.fstat(self.fd).st_size:  # longer than it is mapped if that has failed
                os.ftruncate(self.fd, page_aligned(nbytes))
            self._map()


# ---------------------------------------------------------------------------------------------------------------------
# how much memory there is


_LESS_MEMORY = "use compact state (state=zero_opt.AdamState(...)), NVMeOffload or more ranks"
_REFUSED = (errno.ENOMEM, errno.EFBIG, errno.ENOSPC)


def require_memory(nbytes: int, what: str, instead: str = _LESS_MEMORY) -> None:
    """Raise OutOfMemory unless so much may still be had.

    Pages of a memfd are taken when touched; where there are none left, the process that touches one is killed.

    Args:
        instead: how to need less of it, for the message.
    """
    left = memory_left()
    if nbytes > left:
        raise OutOfMemory(
            f"{what} needs {mib(nbytes)} of host memory, and {mib(left)} may still be had (MemAvailable, and "
            f"the limits of this process's memory cgroups); {instead}, or raise the limit"
        )


@contextlib.contextmanager
def memory_errors(nbytes: int, what: str) -> Iterator[None]:
    """Within it, that the system refuses memory (a limit of the process, say) is an OutOfMemory.

    Raises:
        OutOfMemory: it does. OutOfResources: it refuses a file descriptor for the memory.
    """
    try:
        with descriptor_errors(what):
            yield
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno not in _REFUSED:
            raise
        limit = limit_in(str(error))
        hint = f"raise the limit of {limit}" if limit else "see the limits of this process (ulimit -a)"
        raise OutOfMemory(
            f"{what} needs {mib(nbytes)} of host memory, and the system refuses it ({error}) though "
            f"{mib(memory_left())} may still be had; {hint}"
        ) from error


@contextlib.contextmanager
def allocation_errors(what: str) -> Iterator[None]:
    """Within it, that torch's allocator of host memory gets none is an OutOfMemory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        text = (str(error) or "MemoryError").splitlines()[0]
        raise OutOfMemory(
            f"{what} gets no host memory; see the limits of this process (ulimit -a) and of its memory cgroups ({text})"
        ) from error


def memory_left(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Return the bytes that this process may still take: what the system has, or a cgroup allows, if that is less."""
    available = [value * 1024 for key, value in _table(Path(proc, "meminfo")) if key == "MemAvailable:"]
    return max(min([*available, *_cgroup_left(Path(proc, "self/cgroup"), Path(cgroups)), sys.maxsize]), 0)


def _cgroup_left(listing: Path, root: Path) -> Iterator[int]:
    """Yield what every memory cgroup that this process is in leaves."""
    for line in _text(listing).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            mounts = [root, root / "unified"]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = [root / "memory", root / controllers]
        else:
            continue
        for mount in mounts:
            own = mount / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(mount):
                    yield from _group_left(folder, *names)


def _group_left(folder: Path, limit: str, used: str, cached: str) -> Iterator[int]:
    """Yield what one cgroup leaves; nothing where it sets no limit. Page cache that is not in use can be had back."""
    most, taken = _text(folder / limit).strip(), _text(folder / used).strip()
    if most.isdigit() and taken.isdigit():
        reclaimable = sum(value for key, value in _table(folder / "memory.stat") if key == cached)
        yield int(most) - int(taken) + reclaimable


def _table(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the lines of a file that begin with a word and a number."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdigit():
            yield words[0], int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
