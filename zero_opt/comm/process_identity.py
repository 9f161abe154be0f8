"""What tells hosts and processes apart, and whether a process still runs."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
from typing import NamedTuple

import torch.distributed as dist

# Differs between hosts, and between two starts of one.
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def host_id() -> str:
    """Return a name for this host since its last boot.

    Raises:
        OSError: no descriptor or no memory is left to read the name with.
    """
    try:
        # Read each time: a fork may have moved to another host's namespaces.
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return platform.node()


def host_if_known() -> str:
    """Return :func:`host_id`, or "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return host_id()
    return ""


# States of a process that runs no more.
ENDED = "ZXx"
# Bytes to read of /proc/PID/stat; the line is shorter.
_STAT_NBYTES = 4096


class ProcessIdentity(NamedTuple):
    """The process of a rank, as other processes can recognize it.

    Attributes:
        host: names the host, the process namespace and the time namespace, in which starting times are given.
        started: in clock ticks, to tell the process from a later one with its pid.
        global_rank: the rank in the default process group; -1 where there is none.
    """

    host: str
    pid: int
    started: int
    global_rank: int = -1

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Return the identity of this process; its host is "" if that cannot be named."""
        names = [host_if_known()]
        for kind in ("pid", "time"):
            with contextlib.suppress(OSError):
                names.append(os.readlink(f"/proc/self/ns/{kind}"))
        rank = dist.get_rank() if dist.is_initialized() else -1
        return cls(" ".join(names) if names[0] else "", os.getpid(), _stat(os.getpid())[1], rank)

    def is_near(self, other: ProcessIdentity) -> bool:
        """Return whether both processes are known to be on one host, in the same namespaces."""
        return bool(self.host and self.started) and self.host == other.host

    def has_ended(self) -> bool:
        """Return whether a process of this host runs no more; a zombie has ended."""
        return self.state() in ENDED

    def state(self) -> str:
        """Return the kernel's letter for the state of a process of this host: ``X`` if ended, ``?`` if unknown."""
        state, started = _stat(self.pid)
        return state if state == "?" or started == self.started else "X"


def _stat(pid: int) -> tuple[str, int]:
    """Return state and starting time of a process; ("X", 0) if there is none, ("?", 0) if that cannot be read."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # a file object takes twice the time
        try:
            fields = os.read(descriptor, _STAT_NBYTES).rpartition(b")")[2].split()
        finally:
            os.close(descriptor)
        return fields[0].decode("ascii"), int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    except OSError:  # no descriptors are left, say
        return "?", 0
