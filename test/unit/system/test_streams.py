"""Which streams have delivered to a bucket. What waits for them is shown on the simulated accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_opt.system.devices import build_streams
from zero_opt.system.streams import Producers, Streams


class NamedStreams(Streams):
    """Streams by name; an event is the number of those recorded so far."""

    def __init__(self) -> None:
        self.current, self.recorded = "default", 0

    def produced(self) -> tuple[Any, Any]:
        self.recorded += 1
        return self.current, self.recorded

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.sampled_from("abcd"))
def test_each_producer_counts_once_with_its_latest_event_and_the_last_comes_last(order: list[str], now: str) -> None:
    """B1, B5, B6: whatever size the parameters have. The current stream counts too, up to now."""
    streams = NamedStreams()
    producers = Producers(streams)
    for stream in order:
        with streams.on(stream):
            producers.note()
    latest = {stream: at for at, stream in enumerate(order, 1)}
    delivered = sorted(latest.items(), key=lambda pair: pair[1])
    with streams.on(now):
        events = producers.events()
    assert events == (delivered if now == order[-1] else [(now, len(order) + 1), *delivered])


def test_the_next_fill_begins_with_none() -> None:
    """B4."""
    streams = NamedStreams()
    first = Producers(streams)
    first.note()
    assert Producers(streams).events() == [("default", 2)]


def test_none_recorded_is_the_current_stream() -> None:
    """B3."""
    streams = NamedStreams()
    with streams.on("elsewhere"):
        assert Producers(streams).events() == [("elsewhere", 1)]


def test_the_cpu_has_no_streams() -> None:
    streams = build_streams(torch.device("cpu"))
    assert type(streams) is Streams
    reads: Sequence[Tensor] = [torch.zeros(1)]
    with streams.side([None], reads), streams.on_producer([(None, None)], reads):
        streams.wait(None)
    streams.join(reads)
