"""The exchange of buckets by messages between two ranks, for gloo, whose reduce-scatter is an all-reduce in disguise.

Each rank sends every peer just the part that the peer owns. What lies together in memory for long enough is sent from
there, and received where it is wanted; shorter runs are put together in a buffer. A bucket's runs and shards are the
same on every rank, so both ends of a message cut it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import Span
from ..system.stages import CallStages, in_one_go
from .exchange import (
    BucketReduction,
    Exchange,
    Ident,
    ParamRuns,
    Run,
    RunSpan,
    StagingPool,
    add_mean,
    copy_all,
    of_lane,
    paired,
    put_together,
    run_spans_within,
)
from .headed_messages import MOST_MESSAGES, TAG_MODULUS, HeadedMessages, PeerMessages
from .pieces import in_pieces
from .transfers import wait_all

# Runs of fewer bytes share a message: copying them costs less than a message of their own.
_LEAST_BYTES = 1 << 20
# No shard is cut into more messages: a run that is sent by itself has at least 1/12 of it.
_MOST_DIRECT = (MOST_MESSAGES - 1) // 2
# Buffers of the pool. Two gathers may be under way at a time, but no reduction with them.
SENT, RECEIVED, _ZEROS = 3, 4, 5
_GATHERED = (SENT, RECEIVED)
# Tags of the gather's messages: of elements, and of the last step that failed.
_ELEMENTS, _FAILURES = 2 * TAG_MODULUS, 2 * TAG_MODULUS + 1


class Stretch(NamedTuple):
    """Elements of a bucket that are one message, and the runs that have them."""

    span: Span
    run_spans: Sequence[RunSpan]

    def is_in_place(self, dtype: torch.dtype) -> bool:
        """Return whether the elements lie together in memory, in this dtype."""
        if len(self.run_spans) != 1:
            return False
        run, span = self.run_spans[0]
        return span == self.span and run.tensor is not None and run.tensor.dtype is dtype

    def in_place(self, dtype: torch.dtype) -> Tensor | None:
        """Return a view of the elements where they are, if :meth:`is_in_place`."""
        if not self.is_in_place(dtype):
            return None
        run = self.run_spans[0].run
        values, start = run.values, self.span.start - run.start
        return None if values is None else values[start : start + self.span.numel]


def plan_messages(runs: Sequence[Run], low: int, high: int, itemsize: int) -> list[Stretch]:
    """Cut elements ``low`` to ``high`` of a bucket so that each run that is long enough is a message by itself."""
    least = max(_LEAST_BYTES // itemsize, (high - low) // _MOST_DIRECT, 1)
    messages, begin, short = list[Stretch](), low, list[RunSpan]()
    for run_span in run_spans_within(runs, Span(low, high)):
        start, stop = run_span.span
        if stop - start >= least:
            if begin < start:
                messages.append(Stretch(Span(begin, start), short))
            messages.append(Stretch(run_span.span, [run_span]))
            begin, short = stop, []
        else:
            short.append(run_span)
    if begin < high:
        messages.append(Stretch(Span(begin, high), short))
    return messages


class _ShardMessages(NamedTuple):
    """The messages that carry one rank's shard, and the copies between the runs and those that are not in place.

    Attributes:
        places: views of messages that are not in place. values: views of the same elements in the runs.
    """

    messages: list[Tensor]
    places: list[Tensor]
    values: list[Tensor]


class _Staging:
    """A pooled buffer, for the stretches of one exchange that do not lie together in the dtype in which they travel."""

    def __init__(
        self, pool: StagingPool, slot: int, dtype: torch.dtype, device: torch.device, plans: Iterable[list[Stretch]]
    ) -> None:
        """``plans``: all stretches of the exchange that travel in this dtype."""
        numel = sum(one.span.numel for plan in plans for one in plan if not one.is_in_place(dtype))
        self.buffer, self._used = pool.buffer(slot, numel, dtype, device), 0

    def room(self, stretch: Stretch) -> Tensor:
        """Return the next elements of the buffer."""
        self._used += stretch.span.numel
        return self.buffer[self._used - stretch.span.numel : self._used]

    def filled(self, stretch: Stretch) -> Tensor:
        """Return a stretch's elements, in place or put together here, with zeros where there are none."""
        here = stretch.in_place(self.buffer.dtype)
        return put_together(stretch.run_spans, stretch.span.start, self.room(stretch)) if here is None else here

    def messages_of(self, plan: list[Stretch]) -> _ShardMessages:
        """Return stretches of parameters, in place or with room here."""
        shard = _ShardMessages([], [], [])
        for stretch in plan:
            here = stretch.in_place(self.buffer.dtype)
            if here is None:
                here = self.room(stretch)
                values, places = paired(stretch.run_spans, stretch.span.start, here)
                shard.values.extend(values)
                shard.places.extend(places)
            shard.messages.append(here)
        return shard


class Gathering:
    """The shards of some ranks, on their way into this rank's parameters."""

    def __init__(
        self, arriving: Mapping[int, _ShardMessages], receives: Mapping[int, list[Any]], sends: list[Any]
    ) -> None:
        """``arriving``, ``receives``: by peer."""
        self._arriving, self._receives, self._sends = arriving, receives, sends

    def arrive(self, peer: int) -> None:
        """Wait for a peer's shard."""
        wait_all(self._receives[peer])
        copy_all(self._arriving[peer].values, self._arriving[peer].places)

    def end(self) -> None:
        """Wait until this rank's shard is sent."""
        wait_all(self._sends)


class PairwiseExchange(Exchange):
    """The exchange by messages.

    The ident of a reduction goes ahead of its elements. So a rank that left a backward early, by an exception, is
    noticed: its next bucket is not added to this one.

    Attributes:
        headed: the messages of reductions.
    """

    gathers_ahead, overlaps, way = 1, True, "messages"

    def __init__(
        self,
        for_reduce: PeerMessages,
        for_gather: PeerMessages,
        pool: StagingPool,
        rounded: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        """``rounded``: by peer, what fp32 gradients are rounded to on their way to it and from it."""
        super().__init__(pool)
        self._reduce, self._gather, self._rounded = for_reduce, for_gather, rounded or {}
        self.rank, self.world_size = for_reduce.rank, for_reduce.world_size
        self._peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        self.headed = HeadedMessages(for_reduce, self._peers)

    def sent_as(self, dtype: torch.dtype, peer: int) -> torch.dtype:
        """Return the dtype in which gradients of a dtype travel to a peer, and from it."""
        return self._rounded.get(peer, dtype) if dtype is torch.float32 else dtype

    def connect(self, peers: Iterable[int] | None = None) -> None:
        """Connect to peers, by default all, as they do to this rank."""
        for group in (self._reduce, self._gather):
            group.connect(self._peers if peers is None else peers)

    def has_lanes(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        return True

    def reduce_runs(self, reduction: BucketReduction) -> bool:
        return in_one_go(self.reduce_in_stages(reduction))

    def reduce_in_stages(self, reduction: BucketReduction) -> CallStages[bool]:
        return in_pieces(reduction, self.rank, self._reduce_piece)

    def _reduce_piece(self, reduction: BucketReduction) -> CallStages[bool]:
        ident, runs, bounds, out, _, lane, _ = reduction
        own = Span(bounds[self.rank], bounds[self.rank + 1])
        dtypes = {peer: self.sent_as(out.dtype, peer) for peer in self._peers}
        shards, works, complete = self._room_for(own, self._peers, out, lane), list[Any](), True
        arriving, to_receive, outgoing = dict(shards), dict[torch.dtype, list[Span]](), dict[int, list[Tensor]]()
        for dtype in set(dtypes.values()):
            alike = [peer for peer in self._peers if dtypes[peer] is dtype]
            plans = {peer: plan_messages(runs, bounds[peer], bounds[peer + 1], dtype.itemsize) for peer in alike}
            staging = _Staging(self._pool, of_lane(SENT, lane), dtype, out.device, plans.values())
            outgoing |= {peer: [staging.filled(stretch) for stretch in plan] for peer, plan in plans.items()}
            to_receive[dtype] = [stretch.span for stretch in plan_messages(runs, *own, dtype.itemsize)]
            if dtype is not out.dtype:
                arriving |= self._room_for(own, alike, out.new_empty(0, dtype=dtype), lane)
        numbers = {peer: self.headed.announce(peer, ident, outgoing[peer]) for peer in self._peers}
        yield None
        for peer, dtype in dtypes.items():
            if self.headed.is_in(peer, ident):
                into = [arriving[peer][low - own.start : high - own.start] for low, high in to_receive[dtype]]
                works += self.headed.receive(peer, into)
            else:
                complete = False
            self.headed.send(peer, numbers[peer], outgoing[peer])
            self._sent_nbytes += sum(tensor.nbytes for tensor in outgoing[peer])
        yield None
        wait_all(works)
        if complete:
            for peer, shard in shards.items():
                if arriving[peer] is not shard:
                    shard.copy_(arriving[peer])
            self._add_up(runs, own, shards, out)
            for peer, number in numbers.items():
                self.headed.end(peer, number)
        return complete

    def _room_for(self, own: Span, peers: Sequence[int], like: Tensor, lane: int) -> dict[int, Tensor]:
        """Return room for this rank's shard as some peers have it."""
        room = self._pool.buffer(of_lane(RECEIVED, lane), len(peers) * own.numel, like.dtype, like.device)
        return {peer: room[turn * own.numel : (turn + 1) * own.numel] for turn, peer in enumerate(peers)}

    def _add_up(self, runs: Sequence[Run], own: Span, shards: Mapping[int, Tensor], out: Tensor) -> None:
        """Add up this rank's shard and what the peers have sent of it."""
        for run, (low, high) in run_spans_within(runs, own):
            there = slice(low - own.start, high - own.start)
            if run.values is None:
                values = self._pool.buffer(_ZEROS, high - low, out.dtype, out.device).zero_()
            else:
                values = run.values[low - run.start : high - run.start]
            parts = [values if rank == self.rank else shards[rank][there] for rank in range(self.world_size)]
            add_mean(parts, out[there], add=run.add)

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        gathering = self.start_gather(ident, runs, bounds, self._peers)

        def finish() -> None:
            for peer in reversed(self._peers):
                gathering.arrive(peer)
            gathering.end()

        return finish

    def start_gather(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int], peers: Sequence[int]) -> Gathering:
        """Start to exchange shards with some peers, which must start the same with this rank."""
        messages = self._messages_of_ranks(runs, bounds, (*reversed(peers), self.rank), _GATHERED[ident.sequence % 2])
        receives = {
            peer: [self._gather.receive_from(into, peer, _ELEMENTS) for into in messages[peer].messages]
            for peer in reversed(peers)
        }
        own, sends = messages[self.rank], list[Any]()
        copy_all(own.places, own.values)
        for message in own.messages:
            sends += [self._gather.send_to(message, peer, _ELEMENTS) for peer in peers]
            self._sent_nbytes += message.nbytes * len(peers)
        return Gathering(messages, receives, sends)

    def _messages_of_ranks(
        self, runs: ParamRuns, bounds: Sequence[int], ranks: Sequence[int], slot: int
    ) -> Mapping[int, _ShardMessages]:
        """Return the messages in which ranks' shards travel, by rank."""
        like, plans = runs.first, runs.cache.get(ranks)
        if plans is None:
            item = like.element_size()
            plans = runs.cache[ranks] = {
                rank: plan_messages(runs, bounds[rank], bounds[rank + 1], item) for rank in ranks
            }
        staging = _Staging(self._pool, slot, like.dtype, like.device, plans.values())
        return {rank: staging.messages_of(plan) for rank, plan in plans.items()}

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        """Send one message to each peer, besides those of the gather."""
        failed_steps = self.failed_steps(self._peers)
        return lambda: sorted(rank for rank, failed in failed_steps().items() if failed == step)

    def failed_steps(self, peers: Sequence[int]) -> Callable[[], Mapping[int, int]]:
        """Start to exchange with peers the last step that failed on each; returns that of each, and of this rank."""
        failed = torch.tensor([self._failed_step], dtype=torch.int64, device="cpu")
        words = {rank: failed.clone() for rank in (self.rank, *peers)}
        works = [self._gather.receive_from(words[peer], peer, _FAILURES) for peer in reversed(peers)]
        works += [self._gather.send_to(words[self.rank], peer, _FAILURES) for peer in peers]

        def finish() -> dict[int, int]:
            wait_all(works)
            return {rank: int(word) for rank, word in words.items()}

        return finish

    def close(self) -> None:
        self.headed.close()
