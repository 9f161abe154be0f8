"""The exchange of buckets by messages between two ranks, for gloo, whose reduce-scatter is an all-reduce in disguise.

Each rank sends every peer just the part that the peer owns. What lies together in memory for long enough is sent from
there, and received where it is wanted; shorter runs are put together in a buffer. A bucket's runs and shards are the
same on every rank, so both ends of a message cut it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..layout import Span
from .exchange import (
    BucketReduction,
    Exchange,
    Ident,
    ParamRuns,
    Run,
    StagingPool,
    add_mean,
    copy_all,
    paired,
    parts_within,
    put_together,
    wait_all,
)

# Runs of fewer bytes share a message: copying them costs less than a message of their own.
_LEAST_BYTES = 1 << 20
# No shard is cut into more messages: a run that is sent by itself has at least 1/12 of it.
_MOST_DIRECT = 12
_MOST_MESSAGES = 2 * _MOST_DIRECT + 1
_HEADER_NUMEL = 3 + _MOST_MESSAGES
# Reductions with a peer that have tags of their own, two each: of the header and of the data. All tags have 30 bits.
_TAG_MODULUS = 1 << 29
# Buffers of the pool. Two gathers may be under way at a time, but no reduction with them.
_SENT, _RECEIVED, _ZEROS = 3, 4, 5
_GATHERED = (_SENT, _RECEIVED)
# Tags of the gather's messages: of elements, and of the last step that failed.
_ELEMENTS, _FAILURES = 2 * _TAG_MODULUS, 2 * _TAG_MODULUS + 1


class PeerMessages(Protocol):
    """What the exchange needs of a process group."""

    rank: int
    world_size: int

    def send_to(self, tensor: Tensor, dst: int, tag: int) -> Any:
        """Start sending a contiguous tensor; the result is waited for."""

    def receive_from(self, tensor: Tensor, src: int, tag: int) -> Any:
        """Start receiving a contiguous tensor; messages of one tag come in the order in which they were sent."""


def plan_messages(runs: Sequence[Run], low: int, high: int, itemsize: int) -> list[Span]:
    """Cut elements ``low`` to ``high`` of a bucket so that each run that is long enough is a message by itself."""
    least = max(_LEAST_BYTES // itemsize, (high - low) // _MOST_DIRECT, 1)
    messages, begin = [], low
    for _, (start, stop) in parts_within(runs, Span(low, high)):
        if stop - start >= least:
            if begin < start:
                messages.append(Span(begin, start))
            messages.append(Span(start, stop))
            begin = stop
    if begin < high:
        messages.append(Span(begin, high))
    return messages


def _in_place(runs: Sequence[Run], span: Span) -> Tensor | None:
    """Return a view of the span where it is, if its elements lie together in memory."""
    for run, part in parts_within(runs, span):
        if run.values is not None and part == span:
            return run.values[part.start - run.start : part.stop - run.start]
    return None


class _Stretches:
    """A pooled buffer, for the spans of one exchange that do not lie together."""

    def __init__(
        self, pool: StagingPool, slot: int, like: Tensor, runs: Sequence[Run], plans: Iterable[Sequence[Span]]
    ) -> None:
        """``plans``: all spans of the exchange."""
        numel = sum(span.numel for plan in plans for span in plan if _in_place(runs, span) is None)
        self._runs, self._buffer, self._used = runs, pool.buffer(slot, numel, like.dtype, like.device), 0

    def room(self, numel: int) -> Tensor:
        """Return the next elements of the buffer."""
        self._used += numel
        return self._buffer[self._used - numel : self._used]

    def filled(self, span: Span) -> Tensor:
        """Return a span's elements, in place or put together here, with zeros where there are none."""
        here = _in_place(self._runs, span)
        return put_together(self._runs, span, self.room(span.numel)) if here is None else here


class _Inbox:
    """Messages from one peer, in the order it sent them: a header, then the data of one exchange."""

    def __init__(self, messages: PeerMessages, peer: int) -> None:
        self._messages, self._peer, self._count = messages, peer, 0
        self._header: Tensor | None = None

    def _peek(self) -> tuple[Ident, list[int]]:
        """Return the next exchange's ident, and the sizes of its messages in bytes."""
        if self._header is None:
            header = torch.empty(_HEADER_NUMEL, dtype=torch.int64, device="cpu")
            self._messages.receive_from(header, self._peer, 2 * self._count).wait()
            self._header = header
        step, epoch, sequence, *sizes = self._header.tolist()
        return Ident(step, epoch, sequence), [size for size in sizes if size]

    def take(self, into: Sequence[Tensor]) -> list[Any]:
        """Start receiving the next exchange's messages."""
        tag, self._header = 2 * self._count + 1, None
        self._count = (self._count + 1) % _TAG_MODULUS
        return [self._messages.receive_from(tensor, self._peer, tag) for tensor in into]

    def drop(self) -> None:
        """Receive the next exchange's messages, and drop them."""
        _, sizes = self._peek()
        wait_all(self.take([torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]))

    def skip_before(self, ident: Ident) -> bool:
        """Drop exchanges older than ``ident``; returns whether the next one is ``ident``."""
        while True:
            following, _ = self._peek()
            if following >= ident:
                return following == ident
            self.drop()


class PairwiseExchange(Exchange):
    """The exchange by messages.

    The ident of a reduction goes ahead of its elements. So a rank that left a backward early, by an exception, is
    noticed: its next bucket is not added to this one.
    """

    gathers_ahead = 1

    def __init__(self, for_reduce: PeerMessages, for_gather: PeerMessages, pool: StagingPool) -> None:
        super().__init__(pool)
        self._reduce, self._gather = for_reduce, for_gather
        self._rank, self._world_size = for_reduce.rank, for_reduce.world_size
        self._peers = [(self._rank + i) % self._world_size for i in range(1, self._world_size)]
        self._inbox = {peer: _Inbox(for_reduce, peer) for peer in self._peers}
        self._sent = dict.fromkeys(self._peers, 0)
        self._unread: list[Any] = []

    def reduce_runs(self, reduction: BucketReduction) -> bool:
        ident, runs, bounds, out, _ = reduction
        sends = self._send(ident, runs, bounds, out)
        matches = {peer: self._inbox[peer].skip_before(ident) for peer in sorted(self._peers)}
        if not all(matches.values()):
            for peer, match in matches.items():
                if match:
                    self._inbox[peer].drop()
            # A peer reads these only when it gets to a later exchange, for which it may need us to get there first.
            self._unread += sends
            return False
        self._reduce_received(runs, Span(bounds[self._rank], bounds[self._rank + 1]), out)
        wait_all([*self._unread, *sends])
        self._unread.clear()
        return True

    def _reduce_received(self, runs: Sequence[Run], own: Span, out: Tensor) -> None:
        """Receive every peer's contribution to this rank's shard, and add up."""
        messages = plan_messages(runs, *own, out.element_size())
        received = self._pool.buffer(_RECEIVED, len(self._peers) * own.numel, out.dtype, out.device)
        shards: dict[int, Tensor] = {}
        works = []
        for turn, peer in enumerate(self._peers):
            shard = shards[peer] = received[turn * own.numel : (turn + 1) * own.numel]
            works += self._inbox[peer].take([shard[low - own.start : high - own.start] for low, high in messages])
        wait_all(works)
        for run, (low, high) in parts_within(runs, own):
            there = slice(low - own.start, high - own.start)
            if run.values is None:
                values = self._pool.buffer(_ZEROS, high - low, out.dtype, out.device).zero_()
            else:
                values = run.values[low - run.start : high - run.start]
            parts = [values if rank == self._rank else shards[rank][there] for rank in range(self._world_size)]
            add_mean(parts, out[there], add=run.add)

    def _send(self, ident: Ident, runs: Sequence[Run], bounds: Sequence[int], like: Tensor) -> list[Any]:
        """Start sending every peer its part."""
        plans = {peer: plan_messages(runs, bounds[peer], bounds[peer + 1], like.element_size()) for peer in self._peers}
        stretches = _Stretches(self._pool, _SENT, like, runs, plans.values())
        works = []
        for peer, plan in plans.items():
            sizes = [span.numel * like.element_size() for span in plan] + [0] * (_MOST_MESSAGES - len(plan))
            header = torch.tensor([*ident, *sizes], dtype=torch.int64, device="cpu")
            count = self._sent[peer]
            self._sent[peer] = (count + 1) % _TAG_MODULUS
            works.append(self._reduce.send_to(header, peer, 2 * count))
            works += [self._reduce.send_to(stretches.filled(span), peer, 2 * count + 1) for span in plan]
        return works

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        like = runs.first
        plans = [
            plan_messages(runs, bounds[rank], bounds[rank + 1], like.element_size()) for rank in range(self._world_size)
        ]
        stretches = _Stretches(self._pool, _GATHERED[ident.sequence % 2], like, runs, plans)
        works, later = [], []
        for peer in reversed(self._peers):
            for span in plans[peer]:
                into = _in_place(runs, span)
                if into is None:
                    into = stretches.room(span.numel)
                    later.append((span, into))
                works.append(self._gather.receive_from(into, peer, _ELEMENTS))
        for span in plans[self._rank]:
            own = stretches.filled(span)
            works += [self._gather.send_to(own, peer, _ELEMENTS) for peer in self._peers]

        def finish() -> None:
            wait_all(works)
            for span, into in later:
                values, arrived = paired(runs, span, into)
                copy_all(values, arrived)

        return finish

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        """Send one message to each peer, besides those of the gather."""
        failed = torch.tensor([self._failed_step], dtype=torch.int64, device="cpu")
        words = {rank: failed.clone() for rank in range(self._world_size)}
        works = [self._gather.receive_from(words[peer], peer, _FAILURES) for peer in reversed(self._peers)]
        works += [self._gather.send_to(words[self._rank], peer, _FAILURES) for peer in self._peers]

        def finish() -> list[int]:
            wait_all(works)
            return [rank for rank, word in words.items() if word.item() == step]

        return finish
