"""The exchange of buckets by messages between two ranks, for gloo, whose reduce-scatter is an all-reduce in disguise.

Each rank sends every peer just the part that the peer owns. What lies together in memory for long enough is sent from
there, and received where it is wanted; all shorter runs of a part are put together in a buffer, as one message. A
bucket's runs and shards are the same on every rank, so both ends of a message cut it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, pairwise
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
    StagingPool,
    add_mean,
    copy_all,
    of_lane,
    run_spans_within,
)
from .headed_messages import MOST_MESSAGES, TAG_MODULUS, HeadedMessages, PeerMessages
from .pieces import in_pieces
from .transfers import wait_all

# Runs of fewer bytes share a message: copying them costs less than a message of their own.
_LEAST_BYTES = 1 << 20
# No shard is cut into more messages: a run that is sent by itself has at least 1/24 of it.
_MOST_DIRECT = MOST_MESSAGES - 1
# Buckets and pieces whose plans are kept from step to step.
_MOST_PLANS = 1024
# Buffers of the pool. Two gathers may be under way at a time, but no reduction with them.
SENT, RECEIVED, _ZEROS = 3, 4, 5
_GATHERED = (SENT, RECEIVED)
# Tags of the gather's messages: of elements, and of the last step that failed.
_ELEMENTS, _FAILURES = 2 * TAG_MODULUS, 2 * TAG_MODULUS + 1


class Part(NamedTuple):
    """A part of one run that lies in one rank's shard.

    Attributes:
        run: the index of the run. in_run, in_shard: where the part lies in the run, and in the shard.
    """

    run: int
    in_run: slice
    in_shard: slice


class Parcel(NamedTuple):
    """Elements of one rank's shard that are one message: of a long run, or of all others one after another.

    Attributes:
        numels: of the parts. numel: of all of them.
    """

    parts: Sequence[Part]
    numels: list[int]
    numel: int

    def is_in_place(self, values: Sequence[Tensor | None], dtype: torch.dtype) -> bool:
        """Return whether the elements lie together in memory, in this dtype; ``values``: of all runs."""
        tensor = values[self.parts[0].run]
        return len(self.parts) == 1 and tensor is not None and tensor.dtype is dtype

    def views(self, values: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
        """Yield the elements of each part where they are, or ``None`` where all are zero."""
        for run, in_run, _ in self.parts:
            whole = values[run]
            yield None if whole is None else whole[in_run]


Plan = Sequence[Parcel]


def staged(plans: Mapping[int, Plan], values: Sequence[Tensor | None], dtype: torch.dtype) -> Iterator[Parcel]:
    """Yield the parcels that do not lie together in memory, in this dtype; ``values``: of all runs."""
    return (parcel for plan in plans.values() for parcel in plan if not parcel.is_in_place(values, dtype))


def plan_messages(runs: Sequence[Run], bounds: Sequence[int], itemsize: int) -> Sequence[Plan]:
    """Return the messages that carry each rank's shard of a bucket, none of them empty."""
    return _planned(tuple([(run.start, run.numel) for run in runs]), tuple(bounds), itemsize)


@lru_cache(_MOST_PLANS)
def _planned(runs: Sequence[tuple[int, int]], bounds: Sequence[int], itemsize: int) -> Sequence[Plan]:
    bare = [Run(start, numel, None) for start, numel in runs]
    numbers = {run.start: number for number, run in enumerate(bare)}
    plans = list[Plan]()
    for low, high in pairwise(bounds):
        least = max(_LEAST_BYTES // itemsize, (high - low) // _MOST_DIRECT, 1)
        direct, short = list[Parcel](), list[Part]()
        for (start, *_), span in run_spans_within(bare, Span(low, high)):
            in_run, in_shard = (slice(span.start - origin, span.stop - origin) for origin in (start, low))
            part = Part(numbers[start], in_run, in_shard)
            if span.numel >= least:
                direct.append(_parcel([part]))
            else:
                short.append(part)
        plans.append([*direct, _parcel(short)] if short else direct)
    return plans


def _parcel(parts: Sequence[Part]) -> Parcel:
    numels = [part.in_run.stop - part.in_run.start for part in parts]
    return Parcel(parts, numels, sum(numels))


class _ShardMessages(NamedTuple):
    """The messages that carry one rank's shard, and the copies between the runs and those that are not in place.

    Attributes:
        places: views of messages that are not in place. values: views of the same elements in the runs.
    """

    messages: list[Tensor]
    places: list[Tensor]
    values: list[Tensor]


class _Staging:
    """A pooled buffer, for parcels that do not lie together in the dtype in which they travel."""

    def __init__(self, pool: StagingPool, slot: int, like: Tensor, parcels: Iterable[Parcel]) -> None:
        """``like``: of the dtype and device. ``parcels``: all that need room here."""
        numel = sum(parcel.numel for parcel in parcels)
        self._again = partial(pool.buffer, slot, numel, like.dtype, like.device)
        self.buffer, self._used = self._again(), 0

    def is_current(self) -> bool:
        """Return whether the pool has not replaced the buffer."""
        return self._again().data_ptr() == self.buffer.data_ptr()

    def room(self, parcel: Parcel) -> Tensor:
        """Return the next elements of the buffer."""
        start, self._used = self._used, self._used + parcel.numel
        return self.buffer[start : self._used]

    def messages_of(self, plan: Plan, values: Sequence[Tensor | None]) -> _ShardMessages:
        """Return parcels in place or with room here, which has zeros where a run has no elements."""
        shard = _ShardMessages([], [], [])
        for parcel in plan:
            if parcel.is_in_place(values, self.buffer.dtype):
                [in_place] = parcel.views(values)
                assert in_place is not None, "what is in place is there"
                shard.messages.append(in_place)
                continue
            shard.messages.append(room := self.room(parcel))
            for place, value in zip(torch.split_with_sizes(room, parcel.numels), parcel.views(values), strict=True):
                if value is None:
                    place.zero_()
                else:
                    shard.places.append(place)
                    shard.values.append(value)
        return shard


class _Kept(NamedTuple):
    """The messages of a bucket's last gather, by rank, and the use of the buffer that they are in."""

    slot: int
    staging: _Staging
    messages: Mapping[int, _ShardMessages]


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

    def complete(self) -> None:
        """Wait for every peer's shard, and until this rank's is sent, by one call."""
        wait_all([*chain(*self._receives.values()), *self._sends])
        for peer in self._receives:
            copy_all(self._arriving[peer].values, self._arriving[peer].places)


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
        plans, values = plan_messages(runs, bounds, out.element_size()), [run.values for run in runs]
        outgoing, narrow = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        for dtype, peers in self._by_dtype(out.dtype).items():
            like = out.new_empty(0, dtype=dtype)
            outgoing |= self._outgoing({peer: plans[peer] for peer in peers}, values, like, lane)
            narrow |= self._room_for(peers, plans[self.rank], like, lane) if dtype is not out.dtype else {}
        in_out = None if narrow or any(run.add for run in runs) else out
        shards = self._room_for(self._peers, plans[self.rank], out, lane, in_out)
        numbers = {peer: self.headed.announce(peer, ident, outgoing[peer]) for peer in self._peers}
        yield None
        works, complete, arriving = list[Any](), True, shards | narrow
        for peer in self._peers:
            if self.headed.is_in(peer, ident):
                works += self.headed.receive(peer, arriving[peer])
            else:
                complete = False
            self.headed.send(peer, numbers[peer], outgoing[peer])
            self._sent_nbytes += sum([tensor.nbytes for tensor in outgoing[peer]])
        yield None
        wait_all(works)
        if complete:
            for peer, received in narrow.items():
                copy_all(shards[peer], received)
            self._add_up(plans[self.rank], runs, values, shards, out)
            for peer, number in numbers.items():
                self.headed.end(peer, number)
        return complete

    def _by_dtype(self, dtype: torch.dtype) -> Mapping[torch.dtype, list[int]]:
        """Return the peers, by the dtype in which gradients of a dtype travel to and from them."""
        if not self._rounded:
            return {dtype: self._peers}
        found = dict[torch.dtype, list[int]]()
        for peer in self._peers:
            found.setdefault(self.sent_as(dtype, peer), []).append(peer)
        return found

    def _outgoing(
        self, plans: Mapping[int, Plan], values: Sequence[Tensor | None], like: Tensor, lane: int
    ) -> dict[int, list[Tensor]]:
        """Return messages of gradients, by the peers that they are for."""
        staging = _Staging(self._pool, of_lane(SENT, lane), like, staged(plans, values, like.dtype))
        outgoing = {peer: staging.messages_of(plan, values) for peer, plan in plans.items()}
        for shard in outgoing.values():
            copy_all(shard.places, shard.values)
        return {peer: shard.messages for peer, shard in outgoing.items()}

    def _room_for(
        self, peers: Sequence[int], plan: Plan, like: Tensor, lane: int, out: Tensor | None = None
    ) -> dict[int, list[Tensor]]:
        """Return room for this rank's parcels as peers have them, a tensor each.

        Args:
            out: this rank's shard, if it may be overwritten; the first peer's parcels of one part are received there.
        """
        first = [parcel for parcel in plan if out is None or len(parcel.parts) > 1]
        parcels = chain(first, *[plan] * (len(peers) - 1))
        staging, room = _Staging(self._pool, of_lane(RECEIVED, lane), like, parcels), dict[int, list[Tensor]]()
        for peer in peers:
            room[peer] = [
                staging.room(parcel) if out is None or len(parcel.parts) > 1 else out[parcel.parts[0].in_shard]
                for parcel in plan
            ]
            out = None
        return room

    def _add_up(
        self,
        plan: Plan,
        runs: Sequence[Run],
        values: Sequence[Tensor | None],
        shards: Mapping[int, list[Tensor]],
        out: Tensor,
    ) -> None:
        """Add up this rank's shard, and what the peers have sent of it."""
        for number, parcel in enumerate(plan):
            theirs = {peer: torch.split_with_sizes(sent[number], parcel.numels) for peer, sent in shards.items()}
            by_rank = [theirs.get(rank) or parcel.views(values) for rank in range(self.world_size)]
            for part, *terms in zip(parcel.parts, *by_rank, strict=True):
                there = out[part.in_shard]
                if terms[self.rank] is None:
                    terms[self.rank] = self._pool.buffer(_ZEROS, there.numel(), out.dtype, out.device).zero_()
                add_mean(terms, there, add=runs[part.run].add)

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        return self.start_gather(ident, runs, bounds, self._peers).complete

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
        kept: _Kept | None = runs.cache.get(ranks)
        if kept is not None and kept.slot == slot and kept.staging.is_current():
            return kept.messages
        like = runs.first
        of_ranks, values = plan_messages(runs, bounds, like.element_size()), [run.values for run in runs]
        plans = {rank: of_ranks[rank] for rank in ranks}
        staging = _Staging(self._pool, slot, like, staged(plans, values, like.dtype))
        messages = {rank: staging.messages_of(plan, values) for rank, plan in plans.items()}
        runs.cache[ranks] = _Kept(slot, staging, messages)
        return messages

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
