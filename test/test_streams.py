"""Producer streams, on a fake accelerator whose streams really run out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_opt.buckets import GradBucket
from zero_opt.exchange import Gathering, Ident, StagingPool
from zero_opt.flat_param import FlatParam
from zero_opt.layout import ParamSpec, plan_flat
from zero_opt.streams import NoStreams, Producers, build_streams


class Clock:
    """Streams as queues of calls; ``run`` picks a runnable one by ``choose``: any order that the waits allow."""

    def __init__(self) -> None:
        self.queues: dict[str, list[Any]] = {}
        self.now = "default"
        self.fired: set[int] = set()
        self._events = 0

    def enqueue(self, call: Callable[[], object]) -> None:
        self.queues.setdefault(self.now, []).append(call)

    def record(self) -> int:
        self._events += 1
        event = self._events
        self.enqueue(lambda: self.fired.add(event))
        return event

    def wait(self, event: int) -> None:
        self.queues.setdefault(self.now, []).append(event)

    def run(self, choose: Callable[[int], int]) -> None:
        while True:
            ready = [name for name, queue in sorted(self.queues.items()) if queue and self._runnable(queue[0])]
            if not ready:
                assert not any(self.queues.values()), "a stream waits for an event that is never recorded"
                return
            item = self.queues[ready[choose(len(ready))]].pop(0)
            if callable(item):
                item()

    def _runnable(self, item: Any) -> bool:
        return callable(item) or item in self.fired

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


class FakeStreams:
    """The library's view of the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waited: list[Any] = []

    def produced(self) -> tuple[Any, Any]:
        return self.clock.now, self.clock.record()

    @contextmanager
    def side(self, after: Sequence[Any], reads: Sequence[Tensor]) -> Iterator[None]:
        del reads
        self.waited = list(after)
        with self.clock.on("side"):
            for event in after:
                self.clock.wait(event)
            yield

    def join(self) -> None:
        with self.clock.on("side"):
            event = self.clock.record()
        self.clock.wait(event)


class FakeBucket(GradBucket):
    """A bucket whose staging copies are enqueued like kernels are."""

    clock: Clock

    def _stage(self, grads: Sequence[Tensor | None], staging: Tensor) -> None:
        held = list(grads)
        self.clock.enqueue(lambda: super(FakeBucket, self)._stage(held, staging))


class FakeExchange:
    """World size 1 over the clock: the mean is the bucket."""

    gathers_ahead, nbytes = 0, 0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def direct(self, dtype: torch.dtype) -> None:
        return None

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device, turn: int = 0) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:
        self._clock.enqueue(lambda: out.copy_(bucket))
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Gathering:
        raise AssertionError("not used")

    def close(self) -> None:
        pass


def make_bucket(clock: Clock, numels: Sequence[int], bucket_bytes: float) -> list[FakeBucket]:
    params = [torch.nn.Parameter(torch.zeros(numel)) for numel in numels]
    flats = [FlatParam(param, f"parameter {i}") for i, param in enumerate(params)]
    specs: dict[int, ParamSpec] = {i: flat.spec(0) for i, flat in enumerate(flats)}
    buckets = []
    for layout in plan_flat(specs, 1, bucket_bytes):
        bucket = FakeBucket(layout, [flats[i] for i in layout.params], 0, None)
        bucket.clock, bucket.streams = clock, FakeStreams(clock)
        buckets.append(bucket)
    return buckets


@given(
    producers=st.lists(st.sampled_from(["a", "b", "c", "default"]), min_size=1, max_size=6),
    oversize=st.booleans(),
    picks=st.lists(st.integers(0, 3), max_size=60),
)
def test_reduction_sees_every_producer(producers: list[str], oversize: bool, picks: list[int]) -> None:
    """B1, B2, B5: whatever order streams run in, each gradient is complete when it is staged."""
    clock = Clock()
    buckets = make_bucket(clock, [64] * len(producers), 1 if oversize else 1e9)
    for bucket in buckets:
        fill = bucket.fill()
        for position, index in enumerate(bucket.layout.params):
            grad = torch.full((64,), float("nan"))
            with clock.on(producers[index]):
                clock.enqueue(lambda g=grad, v=index + 1: g.fill_(v))  # type: ignore[misc]
                fill.put(position, grad)
        fill.launch()
        bucket.reduce(fill, Ident(0, 0, 0), [False] * len(bucket.slices), FakeExchange(clock), StagingPool())
        bucket.streams.join()
    turns = iter(picks)
    clock.run(lambda n: next(turns, 0) % n)
    for bucket in buckets:
        for index, grad in zip(bucket.layout.params, bucket.slice_grads(), strict=True):
            assert torch.equal(grad, torch.full((64,), float(index + 1)))


def test_one_event_per_stream_and_cleared_per_fill() -> None:
    """B1, B4, B6: a stream counts once, with its latest event; the next fill starts with none."""
    clock = Clock()
    (bucket,) = make_bucket(clock, [64, 64, 64], 1e9)
    fill = bucket.fill()
    for position in range(3):
        fill.put(position, torch.zeros(64))
    fill.launch()
    assert fill.ready == [3]
    again = bucket.fill()
    again.put(0, torch.zeros(64))
    again.launch()
    assert again.ready == [4]


def test_none_recorded_waits_for_the_current_stream() -> None:
    """B3."""
    clock = Clock()
    with clock.on("elsewhere"):
        producers = Producers(FakeStreams(clock))
        events = producers.events()
    assert len(events) == 1
    assert len(clock.queues["elsewhere"]) == 1


def test_forgetting_a_producer_is_caught_by_the_clock() -> None:
    """The clock is worth something: without the waits, some order reads an unfinished gradient."""
    clock = Clock()
    (bucket,) = make_bucket(clock, [64], 1e9)
    grad, fill = torch.full((64,), float("nan")), bucket.fill()
    with clock.on("a"):
        clock.enqueue(lambda: grad.fill_(1.0))
        fill.put(0, grad)
    fill.launch()
    fill.ready = []
    bucket.reduce(fill, Ident(0, 0, 0), [False], FakeExchange(clock), StagingPool())
    clock.run(lambda n: n - 1)  # "side" sorts last
    assert torch.isnan(bucket.slice_grads()[0]).all()


def test_the_cpu_has_no_streams() -> None:
    streams = build_streams(torch.device("cpu"))
    assert isinstance(streams, NoStreams)
    with streams.side([], []):
        pass
    streams.join()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_side_stream_of_an_accelerator_waits_for_two_producers() -> None:
    device = torch.device("cuda")
    streams = build_streams(device)
    producers, grads = Producers(streams), []
    for _ in range(2):
        stream = torch.Stream(device)
        with stream:
            torch.cuda._sleep(20_000_000)
            grads.append(torch.ones(1 << 20, device=device) * 3)
            producers.note()
    events = producers.events()
    assert len(events) == 2
    with streams.side(events, grads):
        total = grads[0] + grads[1]
    streams.join()
    assert bool((total == 6).all())
