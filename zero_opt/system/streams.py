"""The order of work on accelerator streams, hidden from code that runs on the CPU.

[Note: producer streams]
Autograd runs each hook on the stream that produced the gradient, and several streams may fill one bucket. The gradient
is only enqueued at that time. So a bucket records an event of every stream that delivered to it. The stream that
delivered last waits for the others, and for the current stream of the thread that sends the bucket. In ``step()`` that
may be another stream, on which DDP has written gradients. Then the stream copies all gradients into staging memory.
What the user's program enqueues on it later, such as the replay of a graph that owns the gradients, comes after the
copy.

[Note: the side stream]
Everything that touches a shard of the gradients before ``step()`` runs on one side stream per device: the collective,
which waits for the staging copy, then the sum into the shard, then its copy for a worker (see [Note: early copies]). So
shards need no events of their own, and no stream of the user's ever waits for another rank during backward. ``step()``
makes its stream wait for the side stream; the next work on the side stream waits for the stream that ``step()`` ran on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigConflict
from .waiting import until

# How long a rank that closes waits for what it has enqueued itself.
_DONE_WITHIN_S = 5.0


class Streams:
    """The streams of one device. These are the CPU's, which has none: work is done when the call returns."""

    def produced(self) -> tuple[Any, Any]:
        """Return the current stream, and an event after everything enqueued on it so far."""
        return None, None

    @contextmanager
    def on_producer(self, events: Sequence[tuple[Any, Any]], reads: Sequence[Tensor]) -> Iterator[None]:  # noqa: ARG002
        """Enqueue what follows on the stream of the last (stream, event) pair, after all the events.

        What follows reads the given tensors, which those streams produced.
        """
        yield

    @contextmanager
    def side(self, after: Sequence[Any], reads: Sequence[Tensor]) -> Iterator[None]:  # noqa: ARG002
        """Enqueue what follows on the side stream, after the given events; what follows reads the given tensors.

        The allocator does not reuse the tensors' memory before the side stream is done with them.
        """
        del reads  # so that the caller alone decides when they are freed
        yield

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event."""

    def join(self, reads: Sequence[Tensor]) -> None:
        """Make the current stream wait for the side stream, and the side stream's next work for the current stream.

        The current stream reads the given tensors, which the side stream wrote.
        """


class AcceleratorStreams(Streams):
    """The streams of an accelerator: the user's, and one side stream beside them.

    :meth:`side` and :meth:`join` are for one thread at a time.

    Args:
        priority: of the side stream; lower is sooner.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device, self._priority = device, priority
        self._side: torch.Stream | None = None
        self._reader: torch.Stream | None = None
        self._captures = getattr(torch.get_device_module(device), "is_current_stream_capturing", lambda: False)

    def produced(self) -> tuple[Any, Any]:
        """Return the current stream, and an event after everything enqueued on it so far.

        Raises:
            ConfigConflict: the current stream is being captured into a graph.
        """
        if self._captures():
            raise ConfigConflict(
                "ShardedOptimizer cannot be part of a CUDA graph, whose replay would not call it; capture forward "
                "and backward alone, with reduction=zero_opt.AtStep(), and call step() outside of the graph"
            )
        stream = torch.accelerator.current_stream(self._device)
        return stream, stream.record_event()

    @contextmanager
    def on_producer(self, events: Sequence[tuple[Any, Any]], reads: Sequence[Tensor]) -> Iterator[None]:
        with _own_object(events[-1][0]) as stream:
            for _, event in events[:-1]:
                stream.wait_event(event)
            for tensor in reads:  # nothing to record where the memory is that stream's own
                tensor.record_stream(stream)
            del reads
            yield

    @contextmanager
    def side(self, after: Sequence[Any], reads: Sequence[Tensor]) -> Iterator[None]:
        if self._side is None:
            self._side = torch.Stream(self._device, priority=self._priority)
        with _own_object(self._side) as side:
            reader, self._reader = self._reader, None
            if reader is not None:
                side.wait_stream(reader)
            for event in after:
                side.wait_event(event)
            for tensor in reads:
                tensor.record_stream(side)
            del reads
            yield

    def wait(self, event: Any) -> None:
        torch.accelerator.current_stream(self._device).wait_event(event)

    def join(self, reads: Sequence[Tensor]) -> None:
        self._reader = reader = torch.accelerator.current_stream(self._device)
        if self._side is not None:
            reader.wait_stream(self._side)
        for tensor in reads:
            tensor.record_stream(reader)


def _own_object(stream: torch.Stream) -> torch.Stream:
    """Return another object for the same stream: an object remembers what to go back to, so threads cannot share it."""
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def wait_done(events: Sequence[Any]) -> None:
    """Return when the events have passed, or after a few seconds."""
    until(lambda: all(event.query() for event in events), _DONE_WITHIN_S)


class Producers:
    """The streams that have delivered to one fill of one bucket, each with its latest event."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._events: dict[Any, Any] = {}

    def note(self) -> None:
        """Record that the current stream has delivered."""
        stream, event = self._streams.produced()
        self._events.pop(stream, None)  # the last one comes last
        self._events[stream] = event

    def events(self) -> list[tuple[Any, Any]]:
        """Return (stream, event) pairs: of the current stream, and of those that have delivered, the last one last."""
        stream, event = self._streams.produced()
        delivered = list(self._events.items()) or [(stream, event)]
        # Work on the last stream comes after all that it was given before. On another current stream, such as that of
        # step(), gradients may have been written since they were delivered.
        return delivered if stream == delivered[-1][0] else [(stream, event), *delivered]
