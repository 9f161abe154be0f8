"""The descriptors of a process, and a process that may have none."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


def open_files() -> Iterator[tuple[int, str]]:
    """Yield the number of every descriptor of this process, and what it is of, as ``/proc`` spells it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own, or one that has been closed since
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Within it, this process gets no new descriptor, and the system refuses each of its polls."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
