"""What a backend's errors mean, by their words: all are a plain RuntimeError."""

from __future__ import annotations

import torch.distributed as dist

# In what backends say when a rank is gone or silent.
_SIGNS_OF_LOSS = ("gloo", "onnection", "imed out", "imeout", "NCCL")


def is_loss(error: RuntimeError) -> bool:
    """Return whether a backend's error is about a rank that is gone or silent."""
    return isinstance(error, dist.DistError) or any(sign in first_line(error) for sign in _SIGNS_OF_LOSS)


def timed_out(text: str) -> bool:
    """Return whether this is said of a wait that was too long."""
    return "Timed out" in text


def closed_by_timeout(text: str) -> bool:
    """Return whether gloo says this of a connection that it has closed because a call has waited too long."""
    return "timeout" in text


def closed_by_peer(text: str) -> bool:
    """Return whether gloo says this of a connection that its other process has ended.

    The kernel of a host to which packets do not get resets a connection instead, once its own limit is over.
    """
    return "closed by peer" in text


def ended_at_peer(text: str) -> bool:
    """Return whether gloo says this of a connection that its other process, or the kernel there, has ended."""
    return closed_by_peer(text) or "reset by peer" in text


def network_failed(text: str) -> bool:
    """Return whether gloo says this of a connection that the network has ended, not one of its processes."""
    return any(sign in text for sign in ("Connection timed out", "No route to host", "unreachable"))


def refused_here(text: str) -> bool:
    """Return whether gloo says this of a connection for which this rank's own system has had no memory."""
    return any(
        words in text for words in ("No buffer space available", "Cannot allocate memory", "Too many open files")
    )


def backend_words(error: Exception | None) -> str:
    """Return the first line of the backend's error that an error stems from, or of itself."""
    cause = error.__cause__ if error is not None and isinstance(error.__cause__, Exception) else error
    return "" if cause is None else first_line(cause)


def aside(text: str) -> str:
    """Return a backend's words as messages end with them; "" if there are none."""
    return f" ({text})" if text else ""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error) or type(error).__name__).splitlines()[0]
