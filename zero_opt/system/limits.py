"""The limits of files, and which one the system has refused something for."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ..errors import OutOfResources

# Error numbers of a file that cannot be opened.
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
DESCRIPTOR_LIMIT = "file descriptors: 'ulimit -n', docker's --ulimit nofile"
# It bounds memory that processes share, too.
FILE_SIZE_LIMIT = "the size of files: 'ulimit -f', docker's --ulimit fsize"
# By what the operating system says. The text for all processes' descriptors, ENFILE, begins with that for one's.
_LIMITS = {os.strerror(errno.EMFILE): DESCRIPTOR_LIMIT, os.strerror(errno.EFBIG): FILE_SIZE_LIMIT}


def limit_in(text: str) -> str | None:
    """Return the limit of files that an error's message is about; ``None`` if it is about none."""
    return next((limit for words, limit in _LIMITS.items() if words in text), None)


@contextlib.contextmanager
def descriptor_errors(what: str) -> Iterator[None]:
    """Within it, that the system refuses a file descriptor is an OutOfResources."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_DESCRIPTORS:
            raise
        raise OutOfResources(
            f"{what} needs a file descriptor ({error}); raise the limit of {DESCRIPTOR_LIMIT}"
        ) from error
