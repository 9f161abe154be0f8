"""After the step: every rank's updated shards to all ranks, bucket by bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from ..comm.exchange import Exchange, Ident, copy_all, paired, run_spans_within
from ..comm.groups import Group
from ..errors import OutOfResources
from .buckets import GradBucket
from .flat_param import OwnWrites
from .partition import Partition

# The epoch of gathers, which follow a step's reductions: greater than any number of zero_grad calls, and an int64.
_GATHER_EPOCH = (1 << 63) - 1


class ParamGather:
    """All-gathers buckets; where the exchange allows it, one is on the wire while the one before is copied out.

    Per step the engine calls :meth:`begin`, :meth:`start` for every bucket that some rank has updated, in an order that
    all ranks share, and :meth:`end`, on the user's thread. All three are collective.
    """

    def __init__(self, partition: Partition, exchanges: Mapping[str, Exchange]) -> None:
        self._partition, self._exchanges = partition, exchanges
        self._arrivals: dict[int, Arrivals] = {}
        self._step = self._started = 0
        self._last: Exchange | None = None
        self._under_way: deque[Callable[[], None]] = deque()

    def forget(self) -> None:
        """Parameters were re-pointed: make the views anew."""
        self._arrivals.clear()

    def watch(self) -> None:
        """Parameters were added to the partition."""

    def flush(self) -> None:
        """Return when all parameters are up to date."""

    def watch_late(self) -> None:
        """Wait, from here on, where the user uses a parameter that is not up to date."""

    def unwatch(self) -> None:
        """Undo :meth:`watch_late`."""

    def failed(self) -> Sequence[int]:
        """Return the ranks on which the last step failed, if :meth:`end` could not return them. Waits for them."""
        return ()

    def forget_failure(self) -> None:
        """Forget a failed step: its missing part has arrived since, or a state was loaded."""

    def close(self) -> None:
        """Release what is held."""

    def order(self) -> Sequence[int]:
        """Return the order in which buckets are to be gathered, the same on every rank."""
        return range(len(self._partition.buckets))

    def refusal(self) -> OutOfResources | None:
        """Return the error if this process cannot gather; see :meth:`SerialThread.refusal`."""

    def begin(self, step: int) -> None:
        """Expect the buckets that hold a step's result."""
        self._step, self._started, self._last = step, 0, None
        self._under_way.clear()

    def start(self, bucket: GradBucket, updated: Collection[int], *, failed: bool) -> None:
        """Start to gather a bucket, whose part of this rank is up to date, or as up to date as it will be.

        Args:
            updated: global indices of its parameters that may be others than before, on any rank.
            failed: whether the step has failed on this rank so far.
        """
        self._last, arrivals = self._exchanges[bucket.device.type], self._expected(bucket, updated)
        arrive = self._gather(bucket, self._next_ident(), arrivals, failed=failed)
        self._under_way.append(partial(arrivals.complete, arrive))
        if len(self._under_way) > self._last.gathers_ahead:
            self._under_way.popleft()()

    def end(self) -> Sequence[int]:
        """Return when all buckets have arrived.

        Returns:
            The ranks on which the step failed and of which every rank knows by now; the same on every rank.
        """
        failures = None if self._last is None else self._last.failures(self._step)
        while self._under_way:
            self._under_way.popleft()()
        return () if failures is None else failures()

    def _next_ident(self) -> Ident:
        self._started += 1
        return Ident(self._step, _GATHER_EPOCH, self._started - 1)

    def _expected(self, bucket: GradBucket, updated: Collection[int]) -> Arrivals:
        """Return the parameters to which a bucket is to be gathered; see :meth:`start`."""
        arrivals = self._arrivals.get(bucket.layout.index)
        if arrivals is None:
            arrivals = self._arrivals[bucket.layout.index] = Arrivals(bucket)
        arrivals.expect(updated)
        return arrivals

    def _gather(self, bucket: GradBucket, ident: Ident, arrivals: Arrivals, *, failed: bool) -> Callable[[], None]:
        """Start to gather a bucket; what is returned ends that."""
        exchange = self._exchanges[bucket.device.type]
        if failed:
            exchange.fail(ident.step)
        return exchange.gather_runs(ident, arrivals.runs, bucket.layout.bounds)


class Arrivals:
    """The parameters of a bucket, to which gathers write; kept until one of them is re-pointed.

    Attributes:
        runs: the parameters as they lie in memory. own: counts the writes to those that may get new values.
    """

    def __init__(self, bucket: GradBucket) -> None:
        self.runs = bucket.param_runs()
        self._bucket = bucket
        self._updated: Collection[int] = bucket.layout.params
        self.own = OwnWrites(bucket.params)
        self._mirrored = [flat for flat in bucket.params if flat.mirrored]

    def expect(self, updated: Collection[int]) -> None:
        """Note which parameters, by global index, may get new values; the others get those that they have.

        A graph that has saved one of the others can still go backward.
        """
        if updated != self._updated:
            of_index = zip(self._bucket.layout.params, self._bucket.params, strict=True)
            self.own = OwnWrites(flat for index, flat in of_index if index in updated)
            self._updated = updated

    def complete(self, arrive: Callable[[], None]) -> None:
        """Complete a gather, let parameters that are mirrored follow their mirrors, and count the writes."""
        with self.own.ours():
            self.complete_counted(arrive)

    def complete_counted(self, arrive: Callable[[], None]) -> None:
        """Do as :meth:`complete`, of writes that are counted already."""
        arrive()
        for flat in self._mirrored:
            flat.store()


def broadcast_shards(buckets: Iterable[GradBucket], group: Group) -> None:
    """Bring every rank's shard of the parameters to all, one broadcast each, apart from all exchanges. Collective.

    For when the ranks may not be at the same point of their exchanges.
    """
    for bucket in buckets if group.world_size > 1 else ():
        dtype, numels = bucket.params[0].flat.dtype, (bucket.layout.shard(r).numel for r in range(group.world_size))
        staging = torch.zeros(max(numels), dtype=dtype, device="cpu")
        arrivals = Arrivals(bucket)
        for rank in range(group.world_size):
            shard = bucket.layout.shard(rank)
            chunk = staging[: shard.numel]
            values, places = paired(run_spans_within(arrivals.runs, shard), shard.start, chunk)
            if rank == group.rank:
                copy_all(places, values)
            group.broadcast(chunk.view(torch.uint8), rank)
            if rank != group.rank:
                arrivals.complete(partial(copy_all, values, places))
