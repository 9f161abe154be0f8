"""A step played through on tensors without memory, to see how much each part would take of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..comm.exchange import (
    NATIVE_DTYPES,
    BucketReduction,
    Exchange,
    Ident,
    ParamRuns,
    StagedExchange,
    StagingPool,
    nothing_left,
)
from ..comm.hierarchical_exchange import HierarchicalExchange
from ..comm.pairwise_exchange import PairwiseExchange
from ..comm.shared_memory_exchange import own_nbytes, ranks_per_host
from ..comm.single_rank_exchange import AloneExchange
from ..errors import UnsupportedParam
from ..policies import AlreadyReduced, MixedPrecision
from ..reduction import ReductionPolicy
from ..sharding.buckets import GradBucket
from ..sharding.flat_param import FlatParam, check_memory, check_trainable, is_dtensor
from ..system.devices import is_host
from ..system.extension import native_available
from ..system.stages import CallStages

# Of so many buckets that are alike, each lane has had one, and each turn of a gather.
_ALIKE = 32
# The name of every exchange: messages that are not sent hold zeros.
_IDENT = Ident(0, 0, 0)


class Sketch(NamedTuple):
    """A parameter without its values.

    Attributes:
        flat: of a tensor on the meta device with the parameter's shape, strides and dtype.
        device: where the parameter is, or will be. requires_grad: of the parameter.
    """

    flat: FlatParam
    group: int
    device: torch.device
    requires_grad: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter."""
        return self.flat.param.dtype


def sketch_of(param: Tensor, group: int, device: torch.device, label: str) -> Sketch:
    """The sketch of a parameter, which may be on the meta device itself.

    Raises:
        UnsupportedParam: it cannot be sharded; the message calls it ``label``.
    """
    if is_lazy(param):
        raise UnsupportedParam(f"{label} is not initialized yet; run a forward pass first")
    if is_dtensor(param):
        raise UnsupportedParam(
            f"{label} is a DTensor; of an FSDP2 model estimate what one rank has: zero_opt.estimate(numel // ranks, 1)"
        )
    check_memory(param, label, needed=param.requires_grad)
    if param.requires_grad:
        check_trainable(param, label)
    like = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
    return Sketch(FlatParam(like, label), group, device, param.requires_grad)


class _Arriving(NamedTuple):
    """A message that is received: the one that this rank has sent under the same name by then, else zeros."""

    into: Tensor
    sent: dict[tuple[int, int], Tensor]
    name: tuple[int, int]

    def wait(self) -> None:
        """Have it arrive."""
        self.into.zero_()
        if self.name in self.sent:
            self.into.copy_(self.sent.pop(self.name))


class _Silent:
    """A process group whose peers send the same headers of exchanges as this rank, and else zeros."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._headers: dict[tuple[int, int], Tensor] = {}

    def connect(self, peers: Iterable[int]) -> None:
        """Do nothing."""

    def send_to(self, tensor: Tensor, dst: int, tag: int) -> _Silent:
        if not tensor.is_meta:
            self._headers[dst, tag] = tensor
        return self

    def receive_from(self, tensor: Tensor, src: int, tag: int) -> _Arriving:
        return _Arriving(tensor, self._headers, (src, tag))

    def wait(self) -> None:
        """Nothing is under way."""


class _SilentMemory:
    """Memory that ranks of a host share, in which nothing is exchanged."""

    nbytes = 0

    def reduce(self, ident: Ident, bucket: Any, address: int) -> bool:  # noqa: ARG002
        return True

    def gather(self, ident: Ident, bucket: Any) -> bool:  # noqa: ARG002
        return True

    def leave(self) -> None:
        """Leave nothing."""

    def close(self) -> None:
        """Hold nothing."""


class _Backend(StagedExchange):
    """An accelerator's own collectives, which take whole buckets of staging."""

    gathers_ahead = 1

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:  # noqa: ARG002
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Callable[[], None]:  # noqa: ARG002
        return nothing_left

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        self._staging(ident.sequence % (self.gathers_ahead + 1), bounds[-1], runs.first)
        return nothing_left


class _SharedMemory(PairwiseExchange):
    """The host exchange, which sends messages only of what its kernels cannot add up."""

    def has_lanes(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        """Return ``False``: one bucket is reduced at a time."""
        return False

    def reduce_in_stages(self, reduction: BucketReduction) -> CallStages[bool]:
        return reduction.out.dtype in NATIVE_DTYPES or (yield from super().reduce_in_stages(reduction))

    def gather_runs(self, ident: Ident, runs: ParamRuns, bounds: Sequence[int]) -> Callable[[], None]:
        return nothing_left if runs.first.dtype in NATIVE_DTYPES else super().gather_runs(ident, runs, bounds)


def staging_nbytes(
    buckets: Sequence[GradBucket],
    rank: int,
    world_size: int,
    reduction: ReductionPolicy,
    precision: MixedPrecision,
    *,
    ranks_per_host: int,
) -> int:
    """Bytes of staging that a step takes of ``rank``'s buckets, which have all the shards they need after it.

    Args:
        buckets: on the meta device, except that the layout says where their parameters will be.
        ranks_per_host: ranks with consecutive numbers.
    """
    by_device: dict[torch.device, list[GradBucket]] = {}
    for bucket in buckets:
        by_device.setdefault(torch.device(bucket.layout.device), []).append(bucket)
    total = 0
    for device, there in by_device.items():
        pool = StagingPool()
        shared = reduction.exchange == "auto" and native_available()
        per_host = _sharing(world_size, ranks_per_host) if shared else 1
        elsewhere = [other for other in range(world_size) if other // ranks_per_host != rank // ranks_per_host]
        dtype = precision.between_hosts_dtype
        rounded = {} if dtype is None else dict.fromkeys(elsewhere, dtype)
        exchange = _exchange(device, _Silent(rank, world_size), pool, per_host, rounded)
        reduces = not isinstance(reduction, AlreadyReduced)
        _play_step(device, _some(there), exchange, pool, reduces=reduces)
        total += pool.nbytes
        for bucket in there if reduces else ():
            _ = bucket.shard  # of those, too, that have not been played
        if isinstance(exchange, (_SharedMemory, HierarchicalExchange)):
            total += own_nbytes(world_size, max(bucket.staging_nbytes for bucket in there))
    return total


def _sharing(world_size: int, most_per_host: int) -> int:
    """Return how many ranks exchange through the memory of each host."""
    return ranks_per_host([str(rank // max(most_per_host, 1)) for rank in range(world_size)])


def _exchange(
    device: torch.device, post: _Silent, pool: StagingPool, per_host: int, rounded: Mapping[int, torch.dtype]
) -> Exchange:
    """Return the exchange of the ranks, so many of which share memory."""
    if post.world_size == 1:
        return AloneExchange(pool, blocks=is_host(device))
    if not is_host(device):
        return _Backend(post.rank, pool)
    if per_host == post.world_size:
        return _SharedMemory(post, post, pool)
    messages = PairwiseExchange(post, post, pool, rounded)
    return messages if per_host == 1 else HierarchicalExchange(_SilentMemory(), messages, per_host, pool)


def _some(buckets: Sequence[GradBucket]) -> dict[int, GradBucket]:
    """Return buckets by their turn, without those that find all buffers made: many alike had been in every lane."""
    seen: Counter[object] = Counter()
    kept = dict[int, GradBucket]()
    for turn, bucket in enumerate(buckets):
        layout = bucket.layout
        alike = (layout.numel, layout.numels, tuple(layout.bounds), bucket.dtype, bucket.shard_dtype, bucket.pieces)
        seen[alike] += 1
        if seen[alike] <= _ALIKE:
            kept[turn] = bucket
    return kept


def _play_step(
    device: torch.device, buckets: Mapping[int, GradBucket], exchange: Exchange, pool: StagingPool, *, reduces: bool
) -> None:
    """Reduce and gather buckets of a device, given by their turn, as a step does."""
    for bucket in buckets.values():
        bucket.reserve_staging(pool)
    for bucket in buckets.values() if reduces else ():
        fill = bucket.fill()
        for position, flat in enumerate(bucket.params):
            fill.put(position, torch.empty_like(flat.param))
        bucket.seal(fill)
        if not is_host(device):  # staged in memory that is given back
            fill.staged = torch.empty(bucket.layout.numel, dtype=bucket.dtype, device=bucket.device)
        bucket.reduce(fill, _IDENT, [False] * len(bucket.slices), exchange, pool)
    for turn, bucket in buckets.items():
        exchange.gather_runs(_IDENT._replace(sequence=turn), bucket.param_runs(), bucket.layout.bounds)()
