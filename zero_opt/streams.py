"""Which work must have run before a bucket is read: accelerator streams, hidden from everyone who need not know.

[Note: producer streams]
Autograd runs each hook on the stream that produced the gradient, and several streams may fill one bucket. The gradient
is only enqueued at that time. So a bucket records an event of every stream that delivered to it, and the side stream on
which the bucket is staged and reduced waits for all of them; with none recorded, for the stream current at launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    """The streams of one device."""

    def produced(self) -> tuple[Any, Any]:
        """(current stream, an event after everything enqueued on it so far)."""

    @contextmanager
    def side(self, after: Sequence[Any], reads: Sequence[Tensor]) -> Iterator[None]:
        """Enqueue what follows on the side stream, after the given events; it reads the given tensors.

        The tensors' memory is not reused before the side stream is done with them.
        """

    def join(self) -> None:
        """Let the current stream wait for the side stream."""


class NoStreams:
    """The CPU: work is done when the call returns."""

    def produced(self) -> tuple[Any, Any]:
        """See :class:`Streams`."""
        return None, None

    @contextmanager
    def side(self, after: Sequence[Any], reads: Sequence[Tensor]) -> Iterator[None]:  # noqa: ARG002
        """See :class:`Streams`."""
        del reads  # so that the caller alone decides when they are freed
        yield

    def join(self) -> None:
        """See :class:`Streams`."""


class AcceleratorStreams:
    """One side stream beside whatever streams the user's program runs on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device)

    def produced(self) -> tuple[Any, Any]:
        """See :class:`Streams`."""
        stream = torch.accelerator.current_stream(self._device)
        return stream, stream.record_event()

    @contextmanager
    def side(self, after: Sequence[Any], reads: Sequence[Tensor]) -> Iterator[None]:
        """See :class:`Streams`."""
        with self._side:
            for event in after:
                self._side.wait_event(event)
            for tensor in reads:
                tensor.record_stream(self._side)
            del reads
            yield

    def join(self) -> None:
        """See :class:`Streams`."""
        torch.accelerator.current_stream(self._device).wait_stream(self._side)


class Producers:
    """The streams that have delivered to one fill of one bucket, each with its latest event."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._events: dict[Any, Any] = {}

    def note(self) -> None:
        """The current stream has delivered."""
        stream, event = self._streams.produced()
        self._events[stream] = event

    def events(self) -> list[Any]:
        """What the reduction waits for; called once, on the thread that launches it."""
        if not self._events:
            self.note()
        return list(self._events.values())


def build_streams(device: torch.device) -> Streams:
    """The streams of a device."""
    return NoStreams() if device.type in ("cpu", "meta") else AcceleratorStreams(device)
