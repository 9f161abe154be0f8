"""Gradient buckets: from the gradients of one round to this rank's shard of their mean.

A bucket holds references to the gradients that have arrived until it is complete, so a filling bucket takes no memory
of its own. On the CPU the exchange then reads them where they are, or staged in one call; on an accelerator the thread
that completes the bucket enqueues the staging copy, see [Note: producer streams].

[Note: who owns a shard's memory]
Until a reduction's ``collect()`` has returned, the thread that runs exchanges writes to the shard; after that the
user's thread does.
The shard lies in one tensor at a time, the bucket's own or one in a worker's arena. While it is lent, the worker reads
that tensor and nobody writes to it: every writer gets the shard from ``GradBucket._unlent()``, which moves a lent shard
to another tensor first. A placement lends the shard once it lies in the arena, and reclaims it when the worker is done.
A draft reads a shard that is not lent: the bucket tells its ``reader`` before it writes, and that voids the draft.
A shard on an accelerator is never lent: a worker reads a copy, which a write to the shard makes void.
Under ``AlreadyReduced`` nothing writes to shards, and nothing is drafted: what is stepped is copied to
``GradBucket.arena_places()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import is_, is_not
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm.exchange import (
    MEAN,
    BucketReduction,
    Exchange,
    Flow,
    Ident,
    ParamRuns,
    Run,
    SliceSums,
    StagingPool,
    copy_all,
    of_lane,
)
from ..comm.pieces import count_pieces, lane_of
from ..errors import StateOffloaded
from ..kernels.checks import lacks_memory, oddity
from ..kernels.strides import dtype_of
from ..layout import BucketLayout
from ..system.devices import build_streams, has_streams
from ..system.placing import placing_of
from ..system.stages import CallStages, in_one_go
from ..system.streams import Producers, Streams
from .flat_param import FlatParam

# The use of a pool's buffer for gradients of another dtype or order of dimensions; see MEAN.
_ODD_GRADS = 2
# As Run._make, without a call of Python.
_RUN_OF: Callable[[Iterable[Any]], Run] = partial(tuple.__new__, Run)


class Fill:
    """One round of one bucket: the gradients that have arrived, by position in the bucket.

    Attributes:
        producers: the streams that have delivered; ``None`` on a device that has none.
        sealed: takes no gradient any more, and is ready to be launched.
        staged: the gradients as one tensor, once sealed on an accelerator. ready: the events of that copy.
    """

    def __init__(self, params: Sequence[FlatParam], producers: Producers | None) -> None:
        self.producers = producers
        self.grads: list[Tensor | None] = [None] * len(params)
        self.missing = sum([flat.param.requires_grad for flat in params])
        self.sealed = False
        self.staged: Tensor | None = None
        self.ready: list[Any] = []

    def put(self, position: int, grad: Tensor) -> bool:
        """Take one gradient; return whether every trainable parameter has delivered."""
        self.grads[position] = grad
        self.missing = missing = self.missing - 1
        if self.producers is not None:
            self.producers.note()
        return missing <= 0

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter has delivered."""
        return self.missing <= 0


class ShardReader(Protocol):
    """A reader of shards as soon as they are reduced.

    Per round the bucket calls :meth:`rewrites`, :meth:`sums` and :meth:`reduced`, on the thread that writes the shard,
    where none of them may wait. The others are called on the main thread, with no round under way.
    """

    def rewrites(self, bucket: GradBucket) -> None:
        """Forget what was read of the shard, which is about to be written to."""

    def sums(self, bucket: GradBucket) -> Sequence[SliceSums]:
        """Where the round that is about to be written adds up squares as it goes: per slice, or nowhere."""

    def reduced(self, bucket: GradBucket) -> None:
        """Read the shard, which holds the mean of a round."""

    def scales(self, bucket: GradBucket, factor: float) -> None:
        """Note that the shard is about to be multiplied; may wait until it has been read."""

    def squares(self, bucket: GradBucket) -> Sequence[Tensor | None]:
        """Return per slice the sums of squares of the shard as it is, if they are known; see :func:`grad_squares`."""


class ArenaPlace(NamedTuple):
    """Where a slice's gradient lies in an arena: a 1-D run, and what :meth:`FlatParam.shaped_if_whole` makes of it."""

    run: Tensor
    grad: Tensor


class GradBucket:
    """A bucket's layout bound to tensors: its parameters, and this rank's shard of the reduced gradient.

    Attributes:
        layout: the plan. rank: this one. slices: this rank's parameter slices.
        params: the bucket's parameters, in bucket order.
        pieces: in how many it is reduced, where it has a lane. first_piece: how many the buckets before it have.
        dtype: dtype gradients are sent in. shard_dtype: dtype they are accumulated in.
        reader: is told what becomes of the shard. The placement may set it when it takes the bucket in; if it does not,
            the reduction may, which takes the bucket in later.
        copiers: how many threads may copy to :meth:`arena_places`, on the cores of a worker that has nothing to do
            then; 0 without an arena.

    Args:
        reduce_dtype, accumulate_dtype: as in :class:`MixedPrecision`.
        streams: those of the device, which all its buckets share; made here if there are no others.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[FlatParam],
        rank: int,
        reduce_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype | None = None,
        streams: Streams | None = None,
        flow: Flow = Flow(),  # noqa: B008  (immutable)
    ) -> None:
        self.layout, self.params, self.rank = layout, params, rank
        self.slices = layout.slices(rank)
        position_of = {index: position for position, index in enumerate(layout.params)}
        self._own = [(position_of[piece.param], piece) for piece in self.slices]
        self.device = params[0].param.device
        self.streams = build_streams(self.device) if streams is None else streams
        self.dtype = reduce_dtype or params[0].param.dtype
        self.shard_dtype = accumulate_dtype or self.dtype
        self.shard_numel = layout.shard(rank).numel
        self.pieces, self.first_piece = count_pieces(layout.bounds, self.dtype.itemsize, flow), 0
        self._flow = flow
        self._shards: list[Tensor] = []
        self._at, self._lent, self._arena_count = 0, False, 0
        self._arena_places: list[list[ArenaPlace] | None] = []  # in each tensor of the arena, once asked for
        self._away: list[Tensor] = []
        # What slice_grads() has returned: of which tensor, the views, and where they point.
        self._viewed: Tensor | None = None
        self._views: list[Tensor] = []
        self._addresses: list[int] = []
        self._sent_layouts: object = None  # how gradients lay that were in the order in which they are sent
        self.reader: ShardReader | None = None
        self.copiers = 0

    @property
    def staging_nbytes(self) -> int:
        """Bytes of a staging buffer that the bucket's gradients or parameters fill."""
        return self.layout.numel * max(self.dtype.itemsize, self.params[0].param.element_size())

    @property
    def shard(self) -> Tensor:
        """This rank's reduced gradient, (shard numel,), allocated when first needed and kept."""
        if self._away:
            raise StateOffloaded("gradients are in host memory since offload_state(); call opt.reload_state() first")
        if not self._shards:
            self._shards = [torch.zeros(self.shard_numel, dtype=self.shard_dtype, device=self.device)]
        return self._shards[self._at]

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the shard, zero before the first reduction."""
        return sum(shard.numel() * shard.element_size() for shard in self._shards)

    def leave(self) -> None:
        """Free the shard's memory on an accelerator, with its values, until :meth:`come_back`. Views stay views."""
        for shard in self.own_shards:
            if not shard.is_cpu:
                self._away.append(shard)
                shard.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Take memory for the shard again, filled with zeros.

        The side stream allocates the memory, as before: collectives may write to it when the shard leaves once more.
        """
        with torch.no_grad(), self.streams.side([], []):
            while self._away:
                shard = self._away[-1]
                shard.untyped_storage().resize_(shard.numel() * shard.element_size())
                shard.zero_()
                self._away.pop()

    @property
    def own_shards(self) -> Sequence[Tensor]:
        """The memory of the shard, where it is the bucket's own."""
        return self._shards[self._arena_count :]

    def place_in_arena(self, shards: Sequence[Tensor]) -> None:
        """Keep the shard in the first of one or two tensors in an arena; see [Note: who owns a shard's memory].

        A later call, with tensors over the same memory, leaves the shard where it is.
        """
        self._shards[: self._arena_count] = shards
        self._arena_count = len(shards)
        self._arena_places = [None] * len(shards)

    @property
    def in_arena(self) -> Tensor:
        """The tensor in the arena that has the shard, or to which it is to be copied before :meth:`lend`."""
        return self._shards[self._at % self._arena_count]

    def lend(self) -> None:
        """Let a worker read :attr:`in_arena`, which has the shard, until :meth:`reclaim`."""
        self._at, self._lent = self._at % self._arena_count, True

    def reclaim(self) -> None:
        """End :meth:`lend`: the worker reads the shard no more."""
        self._lent = False

    def arena_places(self, grads: Sequence[Tensor | None]) -> list[tuple[ArenaPlace, Tensor] | None] | None:
        """Return per slice of this rank its place in the arena, and the values of its gradient, in one order.

        ``None`` without an arena, while a worker reads it, or where a gradient has other than plain values in host
        memory, in the order and the dtype of the shard.
        """
        if not self._arena_count or self._lent:
            return None
        pairs, dtype = list[tuple[ArenaPlace, Tensor] | None](), self.in_arena.dtype
        for (position, _), place, grad in zip(self._own, self._places(), grads, strict=True):
            if grad is None:
                pairs.append(None)
                continue
            if type(grad) is not Tensor or oddity(grad) is not None or grad.is_neg():
                return None
            flat = self.params[position]
            in_order = grad.dim() == 1 or grad.stride() == flat.strides
            values = grad if in_order and grad.is_contiguous() else flat.flatten(grad)
            if values.dtype is not dtype or not values.is_cpu or not values.is_contiguous():
                return None
            pairs.append((place, values))
        return pairs

    def _places(self) -> list[ArenaPlace]:
        """Return per slice of this rank its place in :attr:`in_arena`."""
        number = self._at % self._arena_count
        places = self._arena_places[number]
        if places is None:
            runs = [(position, self.in_arena[slice(*piece.in_shard)]) for position, piece in self._own]
            places = [ArenaPlace(run, self.params[position].shaped_if_whole(run)) for position, run in runs]
            self._arena_places[number] = places
        return places

    def writable(self, *, keep: bool) -> Tensor:
        """Return the shard, for a new round or for zeros; tells :attr:`reader`. Undefined values unless ``keep``."""
        if self.reader is not None:
            self.reader.rewrites(self)
        return self._unlent(keep=keep)

    def _unlent(self, *, keep: bool) -> Tensor:
        """Return the shard, to be written to, in memory that is not lent; its values are undefined unless ``keep``."""
        before = self.shard
        if self._lent:
            if len(self._shards) == 1:
                self._shards.append(torch.zeros_like(before))
            self._at, self._lent = 1 - self._at, False
            if keep:
                self.shard.copy_(before)
        return self.shard

    def scale(self, factor: Tensor, value: float | None) -> None:
        """Multiply the shard by a 0-dim tensor, in place; see :func:`scale_shards`.

        Args:
            value: the factor's; may be ``None`` if the bucket has no :attr:`reader`.
        """
        if self.reader is not None:
            assert value is not None, "what a reader knows of the shard would be wrong"
            if value == 1.0:
                return
            self.reader.scales(self, value)
        self._unlent(keep=True).mul_(factor.to(self.device))

    def squares(self) -> Sequence[Tensor | None]:
        """Per slice, its sums of squares as :func:`grad_squares` takes them, or ``None`` where they are not known."""
        return [None] * len(self.slices) if self.reader is None else self.reader.squares(self)

    def slice_grads(self) -> list[Tensor]:
        """Return the shard as this rank's slices, to be read and written: see :meth:`FlatParam.shaped_if_whole`."""
        shard = self._unlent(keep=True)
        if self._viewed is not shard or [*map(Tensor.data_ptr, self._views)] != self._addresses:
            runs = ((self.params[position], shard[slice(*piece.in_shard)]) for position, piece in self._own)
            self._viewed, self._views = shard, [flat.shaped_if_whole(run) for flat, run in runs]
            self._addresses = [*map(Tensor.data_ptr, self._views)]
        return list(self._views)

    def reserve_staging(self, pool: StagingPool) -> None:
        """Reserve room in the buffers that gradients and parameters of this bucket will pass through."""
        for dtype in (self.dtype, self.params[0].param.dtype):
            pool.reserve(self.layout.numel, dtype, self.device)

    def _runs(
        self,
        grads: Sequence[Tensor | None],
        staged: Tensor | None,
        accumulate: Sequence[bool],
        pool: StagingPool,
        lane: int,
    ) -> list[Run]:
        """The gradients as they lie in memory; those with another dtype, order or sign there are copied to a buffer.

        So are those that wrap other tensors, and have no memory to read.
        """
        add = {position: flag for (position, _), flag in zip(self._own, accumulate, strict=True)}
        if staged is not None:
            return [Run(0, self.layout.numel, staged, any(accumulate))]
        offsets, numels, taken = self.layout.offsets, self.layout.numels, [*grads]
        for position, (grad, flat) in () if self._as_sent(grads) else enumerate(zip(grads, self.params, strict=True)):
            if grad is None:
                continue
            differs = grad.dtype is not self.dtype or grad.stride() != flat.strides or grad.is_neg()
            if differs or lacks_memory(grad):
                staging = pool.buffer(of_lane(_ODD_GRADS, lane), self.layout.numel, self.dtype, self.device)
                values = staging[offsets[position] : offsets[position] + numels[position]]
                flat.shaped(values).copy_(grad)
                taken[position] = values
        adds: Iterable[bool] = (
            [add.get(position, False) for position in range(len(taken))] if any(accumulate) else repeat(False)
        )
        return list(map(_RUN_OF, zip(offsets, numels, taken, adds)))

    def _as_sent(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether all gradients are plain and there, in the dtype and the order of elements they are sent in."""
        there = [grad for grad in grads if grad is not None]
        if (
            len(there) < len(grads)
            or any(map(Tensor.is_neg, there))
            or any(map(is_not, map(type, there), repeat(Tensor)))
        ):
            return False
        _, layouts = placing_of(there)
        if layouts == self._sent_layouts:
            return True
        same = all(map(is_, map(dtype_of, there), repeat(self.dtype)))
        same = same and list(map(Tensor.stride, there)) == [flat.strides for flat in self.params]
        self._sent_layouts = layouts if same else None
        return same

    def fill(self) -> Fill:
        """An empty round of this bucket."""
        return Fill(self.params, Producers(self.streams) if has_streams(self.device) else None)

    def seal(self, fill: Fill) -> None:
        """Take no gradient any more, and on an accelerator stage those taken; see [Note: producer streams].

        Called on the thread that completes the bucket. Waits for nothing.
        """
        fill.sealed = True
        if fill.producers is None:
            return
        producers = fill.producers.events()
        with torch.no_grad(), self.streams.on_producer(producers, [grad for grad in fill.grads if grad is not None]):
            # Zeros where no gradient has come. Padding is sent too: they keep it finite and the transfer deterministic.
            staged = fill.staged = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
            places = zip(fill.grads, self.params, self.layout.offsets, self.layout.numels, strict=True)
            taken = [(grad, flat.shaped(staged[at : at + n])) for grad, flat, at, n in places if grad is not None]
            copy_all([view for _, view in taken], [grad for grad, _ in taken])
            fill.ready = [self.streams.produced()[1]]
        fill.grads = []

    def lane(self, exchange: Exchange) -> int | None:
        """Return the lane of this bucket's reductions; see :meth:`Exchange.has_lanes`."""
        if not exchange.has_lanes(self.dtype):
            return None
        return lane_of(self.layout.index, self.first_piece, self.pieces, self._flow)

    def reduce(
        self, fill: Fill, ident: Ident, accumulate: Sequence[bool], exchange: Exchange, pool: StagingPool
    ) -> bool:
        """Reduce one round into the shard, and tell :attr:`reader`; may run off the main thread.

        On an accelerator all of it is enqueued on the side stream; see [Note: the side stream].

        Args:
            fill: sealed.
            accumulate: per slice, whether to add to what the shard holds; else it is overwritten.

        Returns:
            ``False``, and an undefined shard, when another rank skipped this exchange.
        """
        return in_one_go(self.reduce_in_stages(fill, ident, accumulate, exchange, pool))

    def reduce_in_stages(
        self, fill: Fill, ident: Ident, accumulate: Sequence[bool], exchange: Exchange, pool: StagingPool
    ) -> CallStages[bool]:
        """Reduce one round, as :meth:`reduce` does; the shard is written to from the second stage on."""
        grads, fill.grads = fill.grads, []  # let the gradients go as soon as they are read
        staged, fill.staged = fill.staged, None
        events, read = fill.ready, [] if staged is None else [staged]
        stages = self._reduce(grads, staged, ident, accumulate, exchange, pool)
        ended: Any = None
        while True:
            with torch.no_grad(), self.streams.side(events, read):
                try:
                    pieces = stages.send(ended)
                except StopIteration as over:
                    complete: bool = over.value
                    break
            events, read = [], []
            ended = yield pieces
            if self.reader is not None:
                self.reader.rewrites(self)
        if complete and self.reader is not None:
            self.reader.reduced(self)
        return complete

    def _reduce(
        self,
        grads: Sequence[Tensor | None],
        staged: Tensor | None,
        ident: Ident,
        accumulate: Sequence[bool],
        exchange: Exchange,
        pool: StagingPool,
    ) -> CallStages[bool]:
        shard, lane, bounds = self.writable(keep=any(accumulate)), self.lane(exchange) or 0, self.layout.bounds
        first, flow = self.first_piece, self._flow
        # What is staged is one run, whose mean is added as a whole or not at all.
        partly = staged is not None and any(accumulate) and not all(accumulate)
        if self.shard_dtype is self.dtype and not partly:
            runs, sums = self._runs(grads, staged, accumulate, pool, lane), self._sums(exchange)
            reduction = BucketReduction(ident, runs, bounds, shard, sums, first, flow)
            return (yield from exchange.reduce_in_stages(reduction))
        mean = pool.buffer(of_lane(MEAN, lane), self.shard_numel, self.dtype, self.device)
        runs = self._runs(grads, staged, [False] * len(accumulate), pool, lane)
        complete = yield from exchange.reduce_in_stages(BucketReduction(ident, runs, bounds, mean, (), first, flow))
        if complete:
            self._add(mean, accumulate)
        return complete

    def _sums(self, exchange: Exchange) -> Sequence[SliceSums]:
        """Return what :attr:`reader` wants added up, as far as the exchange does that."""
        return () if self.reader is None or self.dtype not in exchange.adds_up else self.reader.sums(self)

    def memory_to_record(self) -> Sequence[Tensor]:
        """Return the parameters, for a stream that did not allocate their memory."""
        return [flat.param for flat in self.params] if has_streams(self.device) else ()

    def param_runs(self) -> ParamRuns:
        """Return the parameters as they lie in memory."""
        places = zip(self.params, self.layout.offsets, self.layout.numels, strict=True)
        return ParamRuns(Run(start, numel, flat.flat) for flat, start, numel in places)

    def _add(self, mean: Tensor, accumulate: Sequence[bool]) -> None:
        for piece, add in zip(self.slices, accumulate, strict=True):
            run = slice(*piece.in_shard)
            if add:
                self.shard[run] += mean[run]
            else:
                self.shard[run] = mean[run]


def scale_shards(buckets: Sequence[GradBucket], factor: Tensor) -> None:
    """Multiply the shards by a 0-dim tensor, in place.

    Waits once for an accelerator that has the factor if any bucket has a reader.
    """
    value = float(factor) if any(bucket.reader is not None for bucket in buckets) else None
    for bucket in buckets:
        bucket.scale(factor, value)


def number_pieces(buckets: Iterable[GradBucket]) -> None:
    """Set :attr:`GradBucket.first_piece` of all buckets, in plan order."""
    total = 0
    for bucket in buckets:
        bucket.first_piece, total = total, total + bucket.pieces
