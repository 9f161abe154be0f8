"""Exchanges of buckets by a backend's own collectives, and the choice of the exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ..errors import ConfigConflict, StepDesync
from ..layout import Span
from ..system.devices import HOST, is_host
from . import process_identity
from .exchange import Exchange, Ident, StagedExchange, StagingPool, chunks_of, mean_in_tree_order
from .groups import ALL, ALONE, FAKE, THREADED, Group
from .pairwise_exchange import PairwiseExchange
from .relay_exchange import RelayExchange
from .shared_memory_exchange import build_host_exchange
from .single_rank_exchange import AloneExchange
from .transfers import Transfer, wait_all

# The backend's own mean: a sum may overflow where the mean does not. (torch's types say less than it takes.)
_MEAN: Any = dist.ReduceOp.AVG


class ListExchange(StagedExchange):
    """The exchange over backends without send and recv (the threaded group of torch's tests): all_to_all of chunks."""

    gathers_ahead = 1

    def __init__(self, reduce_group: Group, gather_group: Group, pool: StagingPool) -> None:
        super().__init__(reduce_group.rank, pool)
        self._reduce, self._gather = reduce_group, gather_group

    def failures(self, step: int) -> Callable[[], Sequence[int]]:
        def compare() -> Sequence[int]:
            words = self._gather.all_gather(torch.tensor([self._failed_step], dtype=torch.int64, device=HOST))
            return [rank for rank, word in enumerate(words) if word.item() == step]

        return compare

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:
        """Raise StepDesync for a skipped exchange: messages cannot be told apart here."""
        idents = self._reduce.all_gather(torch.tensor(ident, dtype=torch.int64, device="cpu"))
        for rank, other in enumerate(idents):
            if other.tolist() != list(ident):
                raise StepDesync(
                    f"rank {rank} exchanges (step, epoch, sequence) {tuple(other.tolist())} while this rank exchanges "
                    f"{tuple(ident)}: an exception left the ranks at different points of a backward"
                )
        chunks = chunks_of(bucket, bounds)
        received = [torch.empty_like(chunks[self._rank]) for _ in chunks]
        Transfer(ALL, self._reduce.pg.alltoall, received, chunks).wait()
        mean_in_tree_order(received, out)
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Callable[[], None]:  # noqa: ARG002
        chunks = chunks_of(bucket, bounds)
        own = chunks[self._rank].clone()
        return Transfer(ALL, self._gather.pg.allgather, [chunks], [own]).wait


class BackendExchange(StagedExchange):
    """The exchange by the collectives of a backend for accelerators, such as NCCL, all over one communicator.

    Reduce-scatter and all-gather where shards are equal, else one reduce or broadcast per owner. Calls return at once:
    work is enqueued on the current stream, and on the communicator's own.
    """

    gathers_ahead, blocks = 1, False

    def __init__(self, group: Group, pool: StagingPool) -> None:
        super().__init__(group.rank, pool)
        self._group = group

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:  # noqa: ARG002
        """Add in the backend's order."""
        pg = self._group.pg
        if isinstance(bounds, range):
            _scatter_mean(pg, _as_real(bucket), _as_real(out))
            return True
        chunks = chunks_of(bucket, bounds)
        for owner, chunk in enumerate(chunks):
            _reduce_mean(pg, _as_real(chunk), owner)
        out.copy_(chunks[self._rank])
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Callable[[], None]:  # noqa: ARG002
        pg, chunks = self._group.pg, chunks_of(bucket, bounds)
        if isinstance(bounds, range):
            return _start_gather(pg, _as_real(bucket), _as_real(chunks[self._rank])).wait
        return partial(wait_all, [_start_broadcast(pg, _as_real(chunk), owner) for owner, chunk in enumerate(chunks)])


class HierarchicalBackendExchange(StagedExchange):
    """The exchange by a backend's collectives in two stages: inside each host, then between ranks in one place each.

    Ranks are numbered host by host. A place has the shards of the ranks that are in it, one per host. A reduction
    brings each rank the mean, over its host, of its place's shards, and then the mean of these means of its own shard.
    A gather goes back the same way. Where shards are equal, a bucket is put in the order of places first, so that what
    a collective takes lies together.
    """

    gathers_ahead, blocks = 1, False

    def __init__(self, group: Group, pool: StagingPool) -> None:
        super().__init__(group.rank, pool)
        self._group, self._hosts, self._per_host = group, group.hosts, group.world_size // group.hosts
        self._place = group.rank % self._per_host

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:  # noqa: ARG002
        """Add in the backend's order, within hosts first."""
        inside, between = self._group.stages
        if isinstance(bounds, range):
            by_host = _as_real(bucket).view(self._hosts, self._per_host, -1)
            by_place = by_host.transpose(0, 1).contiguous()
            means = torch.empty_like(by_place[0])
            _scatter_mean(inside, by_place.view(-1), means.view(-1))
            _scatter_mean(between, means.view(-1), _as_real(out))
            return True
        chunks = chunks_of(bucket, bounds)
        for owner, chunk in enumerate(chunks):
            host, place = divmod(owner, self._per_host)
            _reduce_mean(inside, _as_real(chunk), place)
            if place == self._place:
                _reduce_mean(between, _as_real(chunk), host)
        out.copy_(chunks[self._rank])
        return True

    def _gathered(self, bounds: Sequence[int]) -> Sequence[tuple[Span, int]]:
        if not isinstance(bounds, range):
            return super()._gathered(bounds)
        own_first = sorted(range(self._group.world_size), key=lambda rank: rank != self._rank)
        return [(Span(bounds[rank], bounds[rank + 1]), bounds[self._turn(rank)]) for rank in own_first]

    def _turn(self, rank: int) -> int:
        """Return the number of a rank in the order of places."""
        host, place = divmod(rank, self._per_host)
        return place * self._hosts + host

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Callable[[], None]:  # noqa: ARG002
        """Gather; the bucket has the shards in the order of :meth:`_gathered`."""
        inside, between = self._group.stages
        chunks = list(map(_as_real, chunks_of(bucket, bounds)))
        if isinstance(bounds, range):
            of_places = _as_real(bucket).view(self._per_host, -1)
            _start_gather(between, of_places[self._place], chunks[self._turn(self._rank)]).wait()
            return _start_gather(inside, of_places.view(-1), of_places[self._place]).wait
        arriving = []
        for owner, chunk in enumerate(chunks):
            host, place = divmod(owner, self._per_host)
            if place == self._place:
                _start_broadcast(between, chunk, host).wait()
            arriving.append(_start_broadcast(inside, chunk, place))
        return partial(wait_all, arriving)


def _scatter_mean(pg: Any, whole: Tensor, part: Tensor) -> None:
    """Write this rank's part of the mean of equal parts of a tensor over the ranks of a group."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = _MEAN
    Transfer(ALL, _method(pg, "reduce_scatter_single", "_reduce_scatter_base"), part, whole, options).wait()


def _reduce_mean(pg: Any, chunk: Tensor, owner: int) -> None:
    """Replace a tensor, on its owner, by the mean over the ranks of a group."""
    options = dist.ReduceOptions()
    options.rootRank, options.reduceOp = owner, _MEAN
    Transfer(ALL, pg.reduce, [chunk], options).wait()


def gathered_over(pg: Any, part: Tensor, who: str) -> Tensor:
    """Return the parts of all ranks of a group, which are equally long, one after the other. Collective.

    Args:
        who: the ranks that it may have to wait for.

    Raises:
        PeerLost: a rank has ended, or did not come within the group's timeout.
    """
    whole = part.new_empty(pg.size() * part.numel())
    Transfer(who, _method(pg, "all_gather_single", "_allgather_base"), whole, part, on_host=part.is_cpu).wait()
    return whole


def _start_gather(pg: Any, whole: Tensor, part: Tensor) -> Transfer:
    """Start to bring every rank's part of a tensor, which all are equal, to each rank of a group."""
    return Transfer(ALL, _method(pg, "all_gather_single", "_allgather_base"), whole, part)


def _start_broadcast(pg: Any, chunk: Tensor, owner: int) -> Transfer:
    """Start to overwrite a tensor with its owner's on every rank of a group."""
    options = dist.BroadcastOptions()
    options.rootRank = owner
    return Transfer(ALL, pg.broadcast, [chunk], options)


def _as_real(tensor: Tensor) -> Tensor:
    """Return a tensor as the backend knows its dtype: complex numbers as pairs, which are added alike."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _method(pg: dist.ProcessGroup, name: str, older_name: str) -> Any:
    """Return a process group method under its current name, or the one torch 2.11 has."""
    return getattr(pg, name, None) or getattr(pg, older_name)


def ddp_average(group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[Tensor]:
    """Replace one of DDP's buckets, as DDP itself does, with the mean over the ranks of ``group``, by default all.

    Collective. DDP keeps its hook once an optimizer with ``DDPHook`` is closed.
    """
    return allreduce_hook(group, bucket)  # type: ignore[arg-type]  # which it says cannot be None, and means by it all


def _on_other_hosts(group: Group) -> list[int]:
    """Return the ranks that are on other hosts than this one, or may be. Collective."""
    here = process_identity.host_if_known()
    hosts = [said.decode() for said in group.all_gather_bytes(here.encode())]
    return [rank for rank, host in enumerate(hosts) if rank != group.rank and not here == host != ""]


def between_hosts(group: Group) -> bool:
    """Return whether buckets in host memory go from some ranks to others by messages between hosts. Collective."""
    if group.world_size == 1 or not group.has_send_recv or group.device_backends:
        return False
    return bool(_on_other_hosts(group))


def build_exchange(
    device: torch.device,
    groups: tuple[Group, Group, Group],
    pool: StagingPool,
    *,
    host_bytes: int,
    between_hosts: torch.dtype | None,
) -> Exchange:
    """Return the fastest exchange that the ranks can use for tensors of one type of device. Collective.

    Args:
        groups: for control, reduction and gather.
        host_bytes: size of the largest bucket, to exchange through shared memory as far as ranks are on one host;
            0 to leave it to torch.distributed.
        between_hosts: as ``between_hosts_dtype`` of :class:`MixedPrecision`.

    Raises:
        ConfigConflict: the backend's collectives cannot round what leaves a host.
    """
    control, reduce_group, gather_group = groups
    if control.backend == ALONE:
        return AloneExchange(pool, blocks=is_host(device))
    if reduce_group.backend == THREADED:
        return ListExchange(reduce_group, gather_group, pool)
    if reduce_group.backend == FAKE or device.type in reduce_group.device_backends:
        if between_hosts is not None:
            raise ConfigConflict(
                "MixedPrecision.between_hosts_dtype rounds what leaves a host, which the collectives of the process "
                f"group's backend for {device.type} add up as it is; leave it None, or use reduce_dtype"
            )
        return (BackendExchange if reduce_group.hosts == 1 else HierarchicalBackendExchange)(reduce_group, pool)
    rounded = {} if between_hosts is None else dict.fromkeys(_on_other_hosts(control), between_hosts)
    messages = PairwiseExchange(reduce_group, gather_group, pool, rounded)
    host = build_host_exchange(control, messages, pool, host_bytes) if host_bytes else messages
    if host is messages:
        messages.connect()
    return host if is_host(device) else RelayExchange(reduce_group.rank, host, pool)
