"""Exchanges of buckets between ranks: their interface, and the names, buffers and arithmetic that all of them use.

[Note: order of summation]
The sum over ranks lo to hi is the sum over the first of them, as many as the largest power of two below their number,
plus the sum over the rest: of six ranks ((0 + 1) + (2 + 3)) + (4 + 5). Ranks that share a host, if they are an aligned
block of 2^k, can be added up there first, and the bits are the same as if every rank had sent for itself.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..kernels.adam_state import HALVES
from ..kernels.checks import DTYPE_NAMES, GRAD_DTYPES
from ..layout import Span
from ..system.extension import native, native_available
from ..system.stages import CallStages

_Part = TypeVar("_Part")

# The dtypes of which native kernels compute means, and the kernels' names of them.
NATIVE_DTYPES = {torch.float64: "float64", **{dtype: DTYPE_NAMES[dtype] for dtype in GRAD_DTYPES}}


# The use of a pool's buffer for a mean that is not written to the shard at once. Staging of gathers and of reductions
# that need it has uses 0 and 1, sharding/buckets 2, exchanges by messages 3 to 5.
MEAN = 6
_USES = 7


def of_lane(use: int, lane: int) -> int:
    """Return the use of a pool's buffer that each lane has for itself; see :meth:`Exchange.lane`."""
    return use + lane * _USES


class Ident(NamedTuple):
    """The name of one exchange; later exchanges have greater ones, on every rank alike."""

    step: int
    epoch: int
    sequence: int


class StagingPool:
    """Buffers that buckets pass through, reused from step to step.

    A buffer is keyed by use (``slot``), dtype and device, and grows to the most asked for.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._reserved: dict[tuple[torch.dtype, torch.device], int] = {}
        self._lock = threading.Lock()

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Let what :meth:`staging` returns from now on have room for this many elements.

        A buffer that grew later would be replaced, and the one before kept alive by all who hold views of it.
        """
        with self._lock:
            largest = self._reserved[dtype, device] = max(numel, self._reserved.get((dtype, device), 0))
            for key in [key for key in self._buffers if key[1:] == (dtype, device)]:
                if self._buffers[key].numel() < largest:
                    del self._buffers[key]

    def staging(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer as :meth:`buffer` does, which keeps its place until more is reserved."""
        self.buffer(slot, max(numel, self._reserved.get((dtype, device), 0)), dtype, device)
        return self.buffer(slot, numel, dtype, device)

    def buffer(self, slot: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a 1-D buffer of ``numel`` elements, with the values that its last user left."""
        key = (slot, dtype, device)
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() < numel:
                # Padding is sent too: zeros keep it finite and the transfer deterministic.
                buffer = self._buffers[key] = torch.zeros(numel, dtype=dtype, device=device)
        return buffer[:numel]

    def release(self) -> None:
        """Drop all buffers; holders of views must drop those too. Buffers are made anew when next asked for."""
        with self._lock:
            self._buffers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())


def in_tree_order(parts: Iterable[_Part], add: Callable[[_Part, _Part], _Part]) -> _Part:
    """Add up one part per rank in the one order that all exchanges keep; see [Note: order of summation].

    Args:
        parts: in rank order; at most one sum per power of two is kept while they come.
    """
    sums: list[tuple[int, _Part]] = []  # how many parts, a power of two, and their sum; fewer and fewer
    for part in parts:
        count, total = 1, part
        while sums and sums[-1][0] == count:
            count, total = 2 * count, add(sums.pop()[1], total)
        sums.append((count, total))
    *larger, (_, total) = sums
    for _, before in reversed(larger):
        total = add(before, total)
    return total


def mean_in_tree_order(parts: Sequence[Tensor], out: Tensor, count: int = 0) -> None:
    """Write the sum of one tensor per rank, added in tree order, divided by their number, to ``out``.

    bf16 and fp16 are accumulated in fp32 and rounded once.

    Args:
        count: the number of ranks, if the parts are sums over several each.
    """
    wide = [part.float() for part in parts] if out.dtype in HALVES else parts
    out.copy_(in_tree_order(wide, torch.add) / (count or len(parts)))


def add_mean(parts: Sequence[Tensor], out: Tensor, *, add: bool, count: int = 0) -> None:
    """Write the mean of one chunk per rank, as :func:`mean_in_tree_order` does, to ``out``, or add it to ``out``."""
    if out.is_cpu and out.dtype in NATIVE_DTYPES and native_available():
        addresses = [part.data_ptr() for part in parts]
        native.mean(out.numel(), NATIVE_DTYPES[out.dtype], addresses, out.data_ptr(), add, count)
        return
    mean = torch.empty_like(out) if add else out
    mean_in_tree_order(parts, mean, count)
    if add:
        out.add_(mean)


def chunks_of(bucket: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Return every rank's part of a bucket, in rank order."""
    return [bucket[start:stop] for start, stop in pairwise(bounds)]


class Run(NamedTuple):
    """Elements of a bucket that lie together in memory.

    Attributes:
        start: index in the bucket of the first one.
        tensor: of any shape, has the elements in one stretch of memory; ``None`` where all are zero.
        add: whether their mean is added to what the shard holds, or overwrites it.
    """

    start: int
    numel: int
    tensor: Tensor | None
    add: bool = False

    @property
    def values(self) -> Tensor | None:
        """The elements as a 1-D tensor, a view."""
        tensor = self.tensor
        if tensor is None or tensor.dim() == 1:
            return tensor
        return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())


# Views of runs, and of the same elements' places in a buffer.
Views = tuple[list[Tensor], list[Tensor]]


class ParamRuns(list[Run]):
    """The parameters of a bucket as they lie in memory, each with its values; kept from step to step.

    Attributes:
        cache: what an exchange derived from these runs, by what else it depends on: the address of a staging buffer, a
            dtype, or a tuple of ranks.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        super().__init__(runs)
        self.cache: dict[Hashable, Any] = {}

    @property
    def first(self) -> Tensor:
        """The values of the first run."""
        values = self[0].values
        assert values is not None, "parameters have values"
        return values


class RunSpan(NamedTuple):
    """Some elements of a run, and where in the bucket they are."""

    run: Run
    span: Span


def run_spans_within(runs: Sequence[Run], span: Span) -> Iterator[RunSpan]:
    """Yield every run that has elements within a span of the bucket, and where in the bucket those are."""
    low, high = span
    first = max(bisect_right(runs, low, key=attrgetter("start")) - 1, 0)  # that starts there, or before
    for run in islice(runs, first, None):
        start, stop = run.start, run.start + run.numel
        if start >= high:
            return
        start, stop = max(start, low), min(stop, high)
        if start < stop:
            yield RunSpan(run, Span(start, stop))


def paired(run_spans: Iterable[RunSpan], start: int, buffer: Tensor) -> Views:
    """Return views of some elements of runs, and of their places in ``buffer``, for copies.

    Args:
        start: where in the bucket the buffer begins.
    """
    of_runs, places = list[Tensor](), list[Tensor]()
    for run, (low, high) in run_spans:
        values = run.values
        if values is not None:
            of_runs.append(values[low - run.start : high - run.start])
            places.append(buffer[low - start : high - start])
    return of_runs, places


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of any number, also none, in one call."""
    if targets:
        torch._foreach_copy_(targets, sources)


def put_together(run_spans: Sequence[RunSpan], start: int, buffer: Tensor) -> Tensor:
    """Copy some elements of runs to ``buffer``, zeros where there are no values, and return it."""
    values, places = paired(run_spans, start, buffer)
    copy_all(places, values)
    for run, (low, high) in run_spans:
        if run.values is None:
            buffer[low - start : high - start].zero_()
    return buffer


class SliceSums(NamedTuple):
    """Where to add up the squares of one slice of a shard, while it is in the cache.

    Attributes:
        start: index in the shard of its first element.
        squares: (sum_count(numel),), fp64, as :func:`zero_opt.cpu_adam.grad_squares` takes them.
    """

    start: int
    numel: int
    squares: Tensor


class Flow(NamedTuple):
    """How buckets travel by messages.

    Attributes:
        piece_bytes: a bucket of more is cut into pieces, unless ranks are too many for messages of that size.
        lanes: so many pieces, or buckets of one piece, are under way at a time.
    """

    piece_bytes: int = 6 << 20
    lanes: int = 8


class BucketReduction(NamedTuple):
    """One bucket's gradients on this rank, and where this rank's shard of their mean over the ranks goes.

    Attributes:
        runs: on an accelerator the whole bucket in one run. out: is overwritten, or added to where the runs say so.
            Elements that no run covers mean nothing. sums: ascending; none unless :attr:`Exchange.adds_up` has the
            dtype. lane: of its first piece; see comm/pieces. flow: that of all buckets.
    """

    ident: Ident
    runs: Sequence[Run]
    bounds: Sequence[int]
    out: Tensor
    sums: Sequence[SliceSums] = ()
    lane: int = 0
    flow: Flow = Flow()


class Exchange(ABC):
    """How the ranks of a group exchange buckets.

    Every rank exchanges the same buckets in the same order. Only one thread at a time calls, and one exchange ends
    before the next begins, except as :meth:`has_lanes` and :attr:`gathers_ahead` say; :meth:`leave` and :meth:`close`
    may be called by any thread at any time.

    Attributes:
        gathers_ahead: how many gathers may be started before the oldest has ended.
        blocks: whether calls wait, for other ranks or for copies, so that a background thread has to make them. Else
            they only enqueue work on the current stream, and each reduction has to be matched by one on every rank.
        overlaps: whether :meth:`has_lanes` of any dtype.
        nbytes: memory of its own, beside the pool.
        adds_up: the dtypes of shards whose squares it adds up as it reduces them.
        way: by what buckets travel, in the words of messages.

    Args:
        pool: has the buffers that elements pass through.
    """

    gathers_ahead, nbytes, blocks, overlaps = 0, 0, True, False
    _failed_step = -1  # the last step that failed on this rank
    adds_up: Sequence[torch.dtype] = ()
    way = "the backend's collectives"

    def __init__(self, pool: StagingPool) -> None:
        self._pool = pool
        self._sent_nbytes = 0

    @property
    def sent_nbytes(self) -> int:
        """Bytes of buckets that this rank has sent to others, or that these have read in its shared memory, so far."""
        return self._sent_nbytes

    def _note_reduction(self, bounds: Sequence[int], rank: int, itemsize: int) -> None:
        """Count what other ranks have of this rank's gradients, where every rank needs its shard of all."""
        self._sent_nbytes += (bounds[-1] - (bounds[rank + 1] - bounds[rank])) * itemsize

    def _note_gather(self, bounds: Sequence[int], rank: int, itemsize: int) -> None:
        """Count what other ranks have of this rank's parameters, where all of them need its shard."""
        self._sent_nbytes += (bounds[rank + 1] - bounds[rank]) * (len(bounds) - 2) * itemsize

    @abstractmethod
    def reduce_runs(self, reduction: BucketReduction) -> bool:
        """Bring the mean over ranks of this rank's shard of a bucket to where it goes.

        A rank may skip exchanges that an exception kept it from.

        Returns:
            ``False``, with ``out`` and ``sums`` undefined, when another rank skipped this exchange.
        """

    def has_lanes(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        """Return whether reductions of a dtype may be under way at the same time, in other lanes.

        They then are in the stages of :meth:`reduce_in_stages`.
        """
        return False

    def reduce_in_stages(self, reduction: BucketReduction) -> CallStages[bool]:
        """Reduce a bucket, as :meth:`reduce_runs` does. What needs memory is in the first stage."""
        yield from ()
        return self.reduce_runs(reduction)

    @abstractmethod
    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        """Start bringing every other rank's shard into this rank's runs.

        The result ends it, and must be called.

        Raises:
            StepDesync: another rank skipped this exchange.
        """

    def fail(self, step: int) -> None:
        """Have the following gathers tell the other ranks that this step failed on this rank."""
        self._failed_step = step

    def failures(self, step: int) -> Callable[[], Sequence[int]]:  # noqa: ARG002
        """Begin to ask on which ranks a step failed. Every rank calls this once it has started the step's last gather.

        Returns:
            A function. Once that gather has ended, it returns the ranks that called :meth:`fail` before the gather, the
            same on every rank. An exchange that would have to wait for other ranks to know returns none.
        """
        return tuple

    def leave(self) -> None:
        """Leave all future exchanges: no rank waits for this one in them, and this one waits for no other."""

    def close(self) -> None:
        """Release what is held."""


class StagedExchange(Exchange):
    """The adapter for exchanges that need a bucket in one contiguous tensor.

    What is one run already is exchanged where it is. Other buckets, and all that are gathered, are copied to and from
    buffers of the pool.
    """

    def __init__(self, rank: int, pool: StagingPool) -> None:
        super().__init__(pool)
        self._rank = rank

    @abstractmethod
    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:
        """As :meth:`Exchange.reduce_runs`, of a bucket in one tensor, whose mean overwrites all of ``out``."""

    @abstractmethod
    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Callable[[], None]:
        """Start bringing every other rank's shard into ``bucket``; the result ends it."""

    def _gathered(self, bounds: Sequence[int]) -> Sequence[tuple[Span, int]]:
        """Return spans that make up a bucket, this rank's shard first, and where each begins in a gather's staging."""
        own = Span(bounds[self._rank], bounds[self._rank + 1])
        return [(own, own.start), (Span(0, own.start), 0), (Span(own.stop, bounds[-1]), own.stop)]

    def _staging(self, turn: int, numel: int, like: Tensor) -> Tensor:
        return self._pool.staging(turn, numel, like.dtype, like.device)

    def reduce_runs(self, reduction: BucketReduction) -> bool:
        ident, runs, bounds, out, *_ = reduction
        self._note_reduction(bounds, self._rank, out.element_size())
        bucket = runs[0].values if runs[0].numel == bounds[-1] else None
        if bucket is None:
            run_spans = list(run_spans_within(runs, Span(0, bounds[-1])))
            bucket = put_together(run_spans, 0, self._staging(0, bounds[-1], out))
        if not any(run.add for run in runs):
            return self.reduce_scatter(ident, bucket, bounds, out)
        mean = self._pool.buffer(MEAN, out.numel(), out.dtype, out.device)
        if not self.reduce_scatter(ident, bucket, bounds, mean):
            return False
        own = bounds[self._rank]
        for run, part in run_spans_within(runs, Span(own, bounds[self._rank + 1])):
            there = slice(part.start - own, part.stop - own)
            if run.add:
                out[there] += mean[there]
            else:
                out[there] = mean[there]
        return True

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        self._note_gather(bounds, self._rank, runs.first.element_size())
        bucket = self._staging(ident.sequence % (self.gathers_ahead + 1), bounds[-1], runs.first)
        views = runs.cache.get(bucket.data_ptr())
        if views is None:
            views = runs.cache[bucket.data_ptr()] = [
                paired(run_spans_within(runs, span), span.start - start, bucket)
                for span, start in self._gathered(bounds)
            ]
        (values, places), *arriving = views
        copy_all(places, values)
        end = self.all_gather(ident, bucket, bounds)

        def finish() -> None:
            end()
            for values, places in arriving:
                copy_all(values, places)

        return finish


def nothing_left() -> None:
    """End a gather that is complete already."""


def close_all(exchanges: Mapping[str, Exchange]) -> None:
    """Close these exchanges, which are by device type."""
    for exchange in exchanges.values():
        exchange.close()
