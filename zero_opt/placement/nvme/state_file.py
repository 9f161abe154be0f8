"""One file without a name that holds a rank's state: reserved room, whole blocks to and from buffers, live views.

Transfers go past the page cache where the file system lets them (O_DIRECT), and else are put out of it at once: it is
not memory that is to hold the state. The kernel keeps a shared mapping of a file coherent with direct transfers that
are not under way at the same moment: it writes back what was changed in the mapping before a transfer, and drops the
pages after a write. So views are live, what the user writes to them is followed, and their pages can be had back.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ...errors import OutOfResources, StorageFailed, StorageFull, mib
from ...system.limits import DESCRIPTOR_LIMIT, FILE_SIZE_LIMIT, NO_DESCRIPTORS
from ...system.log import log
from ...system.readable_pages import require_writable
from ...system.shared_memory import CLOSED_BY_PROGRAM, above_stdio, close_own, mapped_bytes

# Direct transfers begin and end at multiples of this in the file and in memory: the largest logical block there is.
BLOCK_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def _open(folder: str) -> int:
    """A new file in a folder, without a name there."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # This file system cannot make one without a name, so it has one for a moment.
    fd, name = tempfile.mkstemp(prefix=".zero_opt_", dir=folder)
    os.unlink(name)
    return fd


@contextmanager
def _storage_errors(what: str, hint: str = "") -> Iterator[None]:
    """Within the context, an OSError becomes StorageFailed, or OutOfResources if there is no descriptor.

    The message says what failed, why, and what to do.
    """
    try:
        yield
    except StorageFailed:
        raise
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise OutOfResources(f"{what} ({error.strerror}); raise the limit of {DESCRIPTOR_LIMIT}") from error
        if error.errno == errno.EBADF:
            hint = f"; {CLOSED_BY_PROGRAM} If so, load a checkpoint into a new optimizer"
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if error.errno in (errno.EFBIG, errno.EINVAL) and most != resource.RLIM_INFINITY:
            # A write that the limit cuts short goes on in the middle of a block.
            hint += f"; files of this process may have {mib(most)} at the most (ulimit -f)"
        raise StorageFailed(f"{what} ({error.strerror}){hint}") from error


def filesystem_of(fd: int, mounts: str = "/proc/self/mountinfo") -> str:
    """The type of the file system that an open file is on; empty if the system does not tell."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for words in (line.split() for line in lines):
        if len(words) > 2 and words[2] == wanted and "-" in words:
            return words[words.index("-") + 1]
    return ""


class StateFile:
    """A file of one rank's state.

    Attributes:
        folder: where it is. nbytes: reserved so far. direct: whether transfers go past the page cache.
        kind: of the file system, as far as is known. in_memory: whether that keeps files in memory.

    Raises:
        StorageFailed: no file can be made there. OutOfResources: there is no file descriptor for one.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self.nbytes, self.direct = os.fspath(folder), 0, False
        with _storage_errors(
            f"no file for optimizer state can be made in {self.folder!r}",
            "; NVMeOffload(path) takes a directory that exists and can be written to",
        ):
            self._fd = above_stdio(_open(self.folder))
        self._close = weakref.finalize(self, close_own, self._fd)
        self._close.atexit = False  # a transfer may be under way, and the number be given to another file
        self._set_direct(True)
        self.kind = filesystem_of(self._fd)
        self.in_memory = self.kind in _IN_MEMORY
        if self.in_memory:
            log.warning("%s is on %s, which is memory: NVMeOffload saves none there", self.folder, self.kind)

    def _set_direct(self, direct: bool) -> None:
        import fcntl  # not on every system that can import the package

        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            direct = False
        self.direct = direct

    # -- room ---------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        """Make the file ``nbytes`` long, a multiple of BLOCK_BYTES; what is added reads as zeros.

        Raises:
            StorageFull, StorageFailed: it cannot be; it is as it was.
        """
        if nbytes <= self.nbytes:
            return
        with _storage_errors(f"optimizer state in {self.folder!r} gets no more room"):
            direct = self.direct
            self._set_direct(False)  # where it must be emulated, reserving writes single bytes
            try:
                os.posix_fallocate(self._fd, self.nbytes, nbytes - self.nbytes)
            except OSError as error:
                os.ftruncate(self._fd, self.nbytes)
                self._refuse(nbytes - self.nbytes, error)
            finally:
                self._set_direct(direct)
        self.nbytes = nbytes

    def _refuse(self, nbytes: int, error: OSError) -> None:
        left = os.fstatvfs(self._fd)
        free = mib(left.f_bavail * left.f_frsize)
        text = f"optimizer state needs {mib(nbytes)} in {self.folder!r}"
        if error.errno in _FULL:
            raise StorageFull(
                f"{text}, where {free} are free ({error.strerror}); make room, use more ranks, or see the user's quota"
            ) from error
        if error.errno == errno.EFBIG:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            instead = (
                "use a folder on a file system that allows longer files"
                if most == resource.RLIM_INFINITY
                else f"raise the limit of {FILE_SIZE_LIMIT} (now {mib(most)})"
            )
            raise StorageFailed(
                f"{text}, where no file may be so long ({error.strerror}); {instead}; or use more ranks"
            ) from error
        raise StorageFailed(f"{text}, which cannot be reserved ({error.strerror}); {free} are free there") from error

    def view(self, start: int, nbytes: int) -> Tensor:
        """Bytes ``start`` to ``start + nbytes`` as they are in the file, (nbytes,) uint8; multiples of BLOCK_BYTES.

        Raises:
            StorageFailed: they cannot be mapped.
        """
        what = f"optimizer state in {self.folder!r} cannot be mapped"
        with _storage_errors(what, "; see the limits of this process (ulimit -a)"):
            return mapped_bytes(self._fd, nbytes, start)

    def require_writable(self, start: int, part: Tensor) -> None:
        """Raise StorageFailed if part of a view, from byte ``start`` of the file on, cannot be written; whole blocks.

        Where the kernel cannot tell, the bytes are read and written back. No transfer is under way.
        """
        if not require_writable(part):
            data = memoryview(mmap.mmap(-1, part.numel()))
            self.read(start, data)
            self.write(start, data)

    # -- transfers ----------------------------------------------------------------------------------------------------

    def read(self, start: int, into: memoryview) -> None:
        """Fill a buffer of whole blocks from byte ``start`` on.

        Raises:
            StorageFailed: not all of it can be read.
        """
        self._whole("reading", os.preadv, start, into)
        if not self.direct:
            os.posix_fadvise(self._fd, start, len(into), os.POSIX_FADV_DONTNEED)

    def write(self, start: int, data: memoryview) -> None:
        """Write a buffer of whole blocks to byte ``start`` on; it has reached the device, or its cache, after that.

        Raises:
            StorageFailed: not all of it can be written; what the file has there is undefined.
        """
        self._whole("writing", os.pwritev, start, data)
        if not self.direct:
            self.sync()  # only what has been written can be put out of the cache
            os.posix_fadvise(self._fd, start, len(data), os.POSIX_FADV_DONTNEED)

    def _whole(self, what: str, call: Callable[..., int], start: int, buffer: memoryview) -> None:
        done = 0
        with _storage_errors(f"{what} {mib(len(buffer))} of optimizer state in {self.folder!r} failed"):
            while done < len(buffer):
                count = call(self._fd, [buffer[done:]], start + done)
                if not count:
                    raise OSError(errno.EIO, "the file ends there")
                done += count

    def sync(self) -> None:
        """What was written to views or by :meth:`write` has reached the device.

        Raises:
            StorageFailed: some has not.
        """
        with _storage_errors(f"writing optimizer state in {self.folder!r} failed"):
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file; no transfer is under way. Its room is given back when the last view of it is gone, too."""
        self._close()
