"""The exchange of buckets in two stages: through shared memory within a host, and by messages between hosts.

Every host has as many ranks, a power of two with consecutive numbers. A rank has one counterpart on each other host:
the rank in the same place there. The ranks of a host divide up what their host sends, so an element crosses the network
once per pair of hosts, however many ranks a host has.

A reduction adds up the shards of one host's ranks at a time, each rank of this host the shard of its counterpart there,
and sends it the sum while the next host's shards are added up. A gather brings each rank its counterparts' shards, and
spreads those within the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import StepDesync
from ..layout import Span
from ..system.stages import CallStages, in_one_go
from .exchange import (
    NATIVE_DTYPES,
    BucketReduction,
    Exchange,
    Ident,
    ParamRuns,
    Run,
    StagingPool,
    add_mean,
    chunks_of,
    copy_all,
    of_lane,
    run_spans_within,
)
from .pairwise_exchange import RECEIVED, SENT, PairwiseExchange
from .pieces import in_pieces
from .shared_ranks import native_bucket
from .transfers import wait_all

# The dtypes whose sums over a host are exact enough to travel: those of bf16 and fp16 would be rounded twice.
_SUMMED = (torch.float32, torch.float64)
# Epoch and sequence of what follows a step's gathers.
_AFTER_GATHERS = ((1 << 63) - 1, (1 << 63) - 1)


class SharedMemory(Protocol):
    """What the exchange needs of the ranks of its host: see :class:`~.shared_ranks.SharedRanks`."""

    nbytes: int

    def reduce(self, ident: Ident, bucket: Any, address: int) -> bool:
        """Bring the sum of this rank's shard of a native bucket to an address."""

    def gather(self, ident: Ident, bucket: Any) -> bool:
        """Bring every other rank's shard of a native bucket into its runs."""

    def leave(self) -> None:
        """Leave all future exchanges."""

    def close(self) -> None:
        """Release what is held."""


class _Sums(NamedTuple):
    """The sums over one host of one shard.

    Attributes:
        void: one element; not 0 if a rank of the host has skipped the exchange.
    """

    values: Tensor
    void: Tensor

    @property
    def messages(self) -> list[Tensor]:
        """What travels of them; no message is empty."""
        return [tensor for tensor in (self.void, self.values) if tensor.numel()]


class HierarchicalExchange(Exchange):
    """The exchange in two stages.

    What the kernels cannot add up exactly (complex numbers, bf16 and fp16) is reduced by messages alone, on every rank.

    No rank waits for another in a circle, even where ranks skip exchanges: a rank in an exchange first announces it to
    other hosts, then to the ranks of its host, and waits for neither before it has done both.
    """

    gathers_ahead, overlaps, way = 1, True, "shared memory, and messages between hosts"

    def __init__(self, shared: SharedMemory, messages: PairwiseExchange, per_host: int, pool: StagingPool) -> None:
        """``per_host``: the number of ranks of each host."""
        super().__init__(pool)
        self.nbytes, self._shared, self._messages = shared.nbytes, shared, messages
        self._per_host, self._world_size = per_host, messages.world_size
        hosts = messages.world_size // per_host
        self._host, place = divmod(messages.rank, per_host)
        self._counterparts = [host * per_host + place for host in range(hosts)]
        # In this order hosts are served: others first, each host another one, and the own host last.
        self._order = [(self._host + turn) % hosts for turn in range(1, hosts + 1)]

    def _local(self, ident: Ident, turn: int) -> Ident:
        """Return the name of one of an exchange's parts within the host."""
        return ident._replace(sequence=ident.sequence * len(self._order) + turn)

    def _bounds(self, bounds: Sequence[int], host: int) -> Sequence[int]:
        """Return the bounds of the shards of one host's ranks."""
        return bounds[host * self._per_host : (host + 1) * self._per_host + 1]

    def _native(self, runs: Sequence[Run], bounds: Sequence[int], host: int, dtype: torch.dtype) -> Any:
        """Return the part of a bucket that one host's ranks own."""
        of_host = self._bounds(bounds, host)
        within = [run._replace(add=False) for run, _ in run_spans_within(runs, Span(of_host[0], of_host[-1]))]
        return native_bucket(within, of_host, dtype)

    @property
    def sent_nbytes(self) -> int:
        """See :class:`Exchange`; of what goes through shared memory nothing is counted."""
        return self._sent_nbytes + self._messages.sent_nbytes

    def has_lanes(self, dtype: torch.dtype) -> bool:
        return dtype in _SUMMED

    def reduce_runs(self, reduction: BucketReduction) -> bool:
        if reduction.out.dtype in _SUMMED:
            return in_one_go(self.reduce_in_stages(reduction))
        # All ranks know by this, before any waits for a message of another, whether one has skipped the exchange.
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        come = self.reduce_runs(BucketReduction(reduction.ident, (), [0] * (self._world_size + 1), empty))
        return come and self._messages.reduce_runs(reduction)

    def reduce_in_stages(self, reduction: BucketReduction) -> CallStages[bool]:
        if reduction.out.dtype not in _SUMMED:
            return self.reduce_runs(reduction)
        return (yield from in_pieces(reduction, self._messages.rank, self._reduce_piece))

    def _reduce_piece(self, reduction: BucketReduction) -> CallStages[bool]:
        ident, runs, bounds, out, _, lane, _ = reduction
        headed, numels = self._messages.headed, [bounds[rank + 1] - bounds[rank] for rank in self._counterparts]
        others = self._order[:-1]
        sent_as = self._messages.sent_as(out.dtype, self._counterparts[others[0]])
        sums = self._rooms(of_lane(SENT, lane), numels, out)
        rounded = out.new_empty(0, dtype=sent_as)
        leaving = sums if sent_as is out.dtype else self._rooms(of_lane(SENT, lane), numels, rounded)
        arriving = self._rooms(of_lane(RECEIVED, lane), [numels[self._host]] * len(numels), rounded)
        buckets = {host: self._native(runs, bounds, host, out.dtype) for host in self._order}
        numbers = {host: headed.announce(self._counterparts[host], ident, leaving[host].messages) for host in others}
        yield None
        here, met, works = True, list[int](), list[Any]()
        for turn, (host, bucket) in enumerate(buckets.items()):
            # All ranks of this host find alike that one of them has skipped this exchange.
            here = here and self._shared.reduce(self._local(ident, turn), bucket, sums[host].values.data_ptr())
            if turn == 0:
                met = [other for other in others if headed.is_in(self._counterparts[other], ident)]
                for other in met:
                    works += headed.receive(self._counterparts[other], arriving[other].messages)
            if host != self._host:
                if leaving is not sums:
                    leaving[host].values.copy_(sums[host].values)
                leaving[host].void.fill_(not here)
                headed.send(self._counterparts[host], numbers[host], leaving[host].messages)
                self._sent_nbytes += leaving[host].values.nbytes
        yield None
        wait_all(works)
        for host in met:  # before their memory is used again, also where they are void
            headed.end(self._counterparts[host], numbers[host])
        if not here or len(met) < len(others) or any(arriving[host].void.item() for host in others):
            return False
        arriving[self._host] = sums[self._host]
        self._add_up(reduction, self._widened([of_host.values for of_host in arriving], out))
        return True

    def _widened(self, sums: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
        """Return the sums over each host in one dtype; those of other hosts may have come in a narrower one."""
        if all(of_host.dtype is like.dtype for of_host in sums):
            return sums
        wide = [room.values for room in self._rooms(RECEIVED, [like.numel()] * len(sums), like)]
        copy_all(wide, list(sums))
        return wide

    def _rooms(self, slot: int, numels: Sequence[int], like: Tensor) -> list[_Sums]:
        """Return room for one shard per host."""
        buffer = self._pool.buffer(slot, sum(numels), like.dtype, like.device)
        shards = chunks_of(buffer, list(accumulate(numels, initial=0)))
        return [_Sums(shard, torch.zeros(1, dtype=torch.int64, device="cpu")) for shard in shards]

    def _add_up(self, reduction: BucketReduction, sums: Sequence[Tensor]) -> None:
        """Write the mean over all ranks of this rank's shard, given the sums over each host."""
        _, runs, bounds, out, *_ = reduction
        own = Span(bounds[self._messages.rank], bounds[self._messages.rank + 1])
        for run, (low, high) in run_spans_within(runs, own):
            there = slice(low - own.start, high - own.start)
            add_mean([part[there] for part in sums], out[there], add=run.add, count=self._world_size)

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        dtype = runs.first.dtype
        if dtype not in NATIVE_DTYPES:
            return self._messages.gather_runs(ident, runs, bounds)
        buckets = runs.cache.get(dtype)
        if buckets is None:
            buckets = runs.cache[dtype] = [self._native(runs, bounds, host, dtype) for host in range(len(self._order))]
        peers = [self._counterparts[host] for host in self._order[:-1]]
        gathering = self._messages.start_gather(ident, runs, bounds, peers)

        def finish() -> None:
            # The shards of this host's own ranks, while those of other hosts are on their way.
            for turn, host in enumerate([self._host, *self._order[:-1]]):
                if host != self._host:
                    gathering.arrive(self._counterparts[host])
                if not self._shared.gather(self._local(ident, turn), buckets[host]):
                    raise StepDesync(f"another rank skipped the parameter exchange of step {ident.step}")
            gathering.end()

        return finish

    def fail(self, step: int) -> None:
        self._messages.fail(step)

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        """Send one message to each counterpart, besides those of the gather, and spread what they say in the host."""
        peers = [self._counterparts[host] for host in self._order[:-1]]
        failed_steps, hosts = self._messages.failed_steps(peers), len(self._order)
        place = self._messages.rank % self._per_host
        words = torch.zeros(self._per_host, hosts, dtype=torch.int64, device="cpu")

        def finish() -> list[int]:
            for rank, failed in failed_steps().items():
                words[place, rank // self._per_host] = failed
            runs = [Run(0, words.numel(), words.view(torch.float64).view(-1), False)]  # of which only bytes are copied
            bounds = range(0, words.numel() + 1, hosts)
            if not self._shared.gather(Ident(step, *_AFTER_GATHERS), native_bucket(runs, bounds, torch.float64)):
                raise StepDesync(f"another rank skipped the end of step {step}")
            return [rank for rank, failed in enumerate(words.t().flatten().tolist()) if failed == step]

        return finish

    def leave(self) -> None:
        self._shared.leave()
        self._messages.leave()

    def close(self) -> None:
        self._shared.close()
        self._messages.close()
