"""What is undone if what comes after it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` where an exception ends the context, whichever it is."""
    try:
        yield
    except BaseException:
        undo()
        raise
