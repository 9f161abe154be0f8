"""A step played through on tensors without memory, to see how much each part would take of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..comm.exchange import (
    NATIVE_DTYPES,
    DirectExchange,
    Exchange,
    Gathering,
    Ident,
    PooledExchange,
    Run,
    SliceSums,
    StagingPool,
)
from ..comm.pairwise_exchange import PairwiseExchange
from ..comm.shared_memory_exchange import own_nbytes
from ..comm.single_rank_exchange import AloneExchange
from ..errors import UnsupportedParam
from ..layout import BucketLayout, ParamSpec, plan_flat, plan_whole_params
from ..policies import AlreadyReduced
from ..reduction import Policy
from ..sharding.buckets import GradBucket
from ..sharding.flat_param import FlatParam, check_memory, is_dtensor
from ..sharding.partition import Geometry
from ..system.devices import is_host
from ..system.extension import native_available

# Messages that nobody sends hold zeros, and so this name.
_IDENT = Ident(0, 0, 0)


class Sketch(NamedTuple):
    """A parameter without its values.

    Attributes:
        flat: of a tensor on the meta device with the parameter's shape, strides and dtype.
        device: where the parameter is, or will be.
    """

    flat: FlatParam
    group: int
    device: torch.device

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
            f"{label} is a DTensor; estimate the model as it is before fully_shard(), which cuts it into parts as large"
        )
    check_memory(param, label)
    like = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
    return Sketch(FlatParam(like, label), group, device)


class _Silent:
    """A process group whose peers send zeros, at once."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def send_to(self, tensor: Tensor, dst: int, tag: int) -> _Silent:  # noqa: ARG002
        return self

    def receive_from(self, tensor: Tensor, src: int, tag: int) -> _Silent:  # noqa: ARG002
        tensor.zero_()
        return self

    def wait(self) -> None:
        """Nothing is under way."""


class _Backend(PooledExchange):
    """An accelerator's own collectives, which take whole buckets of staging."""

    gathers_ahead = 1

    def reduce_scatter(self, ident: Ident, bucket: Tensor, bounds: Sequence[int], out: Tensor) -> bool:  # noqa: ARG002
        return True

    def all_gather(self, ident: Ident, bucket: Tensor, bounds: Sequence[int]) -> Gathering:  # noqa: ARG002
        return Gathering((), ())


class _SharedMemory(_Backend):
    """The host exchange: slots of its own, and ``fallback`` for what its kernels cannot add up."""

    def __init__(self, pool: StagingPool, fallback: Exchange, nbytes: int) -> None:
        super().__init__(pool)
        self._fallback, self.nbytes = fallback, nbytes

    def direct(self, dtype: torch.dtype) -> DirectExchange | None:
        return self if dtype in NATIVE_DTYPES else self._fallback.direct(dtype)

    def reduce_runs(
        self,
        ident: Ident,  # noqa: ARG002
        runs: Sequence[Run],  # noqa: ARG002
        bounds: Sequence[int],  # noqa: ARG002
        out: Tensor,  # noqa: ARG002
        sums: Sequence[SliceSums] = (),  # noqa: ARG002
    ) -> bool:
        return True

    def gather_runs(self, ident: Ident, runs: Sequence[Run], bounds: Sequence[int]) -> Callable[[], None]:  # noqa: ARG002
        return self.close


class Rehearsal:
    """The plan of sketched parameters, and what a step by it takes.

    Args:
        sketches: trainable parameters by global index. ranks: how many there are, and how many a host has.

    Attributes:
        layouts: the plan, as the optimizer would make it.
    """

    def __init__(
        self, sketches: Mapping[int, Sketch], ranks: tuple[int, int], reduction: Policy, geometry: Geometry
    ) -> None:
        (self._world_size, self._ranks_per_host), self._sketches, self._reduction = ranks, sketches, reduction
        self._dtypes = (geometry.reduce_dtype, geometry.accumulate_dtype)
        specs: dict[int, ParamSpec] = {
            index: found.flat.spec(found.group)._replace(device=str(found.device)) for index, found in sketches.items()
        }
        planner = plan_whole_params if geometry.whole else plan_flat
        self.layouts: list[BucketLayout] = planner(specs, self._world_size, geometry.bucket_mb * 2**20)

    def fullest_rank(self) -> int:
        """The rank whose shards have the most elements; of several the first."""
        loads = [0] * self._world_size
        for bounds in (plan.bounds for plan in self.layouts if not isinstance(plan.bounds, range)):  # else all alike
            for rank, (start, stop) in enumerate(pairwise(bounds)):
                loads[rank] += stop - start
        return loads.index(max(loads))

    def buckets(self, rank: int) -> list[GradBucket]:
        """A rank's buckets, on the meta device but for what they call their device."""
        return [
            GradBucket(plan, [self._sketches[index].flat for index in plan.params], rank, *self._dtypes)
            for plan in self.layouts
        ]

    def staging_nbytes(self, rank: int, buckets: Iterable[GradBucket]) -> int:
        """Bytes of staging that a step takes, of ``rank``'s buckets, which have all the shards they need after it."""
        by_device: dict[torch.device, list[GradBucket]] = {}
        for bucket in buckets:
            by_device.setdefault(torch.device(bucket.layout.device), []).append(bucket)
        return sum(self._staging_on(device, rank, there) for device, there in by_device.items())

    def _staging_on(self, device: torch.device, rank: int, buckets: Sequence[GradBucket]) -> int:
        pool = StagingPool()
        exchange = self._exchange(device, rank, pool, max(bucket.staging_nbytes for bucket in buckets))
        for bucket in buckets:
            bucket.reserve_staging(pool)
        if not isinstance(self._reduction, AlreadyReduced):
            for bucket in buckets:
                fill = bucket.fill()
                for position, flat in enumerate(bucket.params):
                    fill.put(position, torch.empty_like(flat.param))
                bucket.launch(fill)
                if not is_host(device):  # staged in memory that is given back
                    fill.staged = torch.empty(bucket.layout.numel, dtype=bucket.dtype, device=bucket.device)
                bucket.reduce(fill, _IDENT, [False] * len(bucket.slices), exchange, pool)
        for turn, bucket in enumerate(buckets):
            _gather(bucket, turn, exchange)
        return pool.nbytes + exchange.nbytes

    def _exchange(self, device: torch.device, rank: int, pool: StagingPool, largest_bytes: int) -> Exchange:
        """Return the exchange that the ranks use: in shared memory on one host, unless the policy says otherwise."""
        if self._world_size == 1:
            return AloneExchange(pool, blocks=is_host(device))
        if not is_host(device):
            return _Backend(pool)
        post = _Silent(rank, self._world_size)
        pairwise = PairwiseExchange(post, post, pool)
        if self._reduction.exchange != "auto" or self._ranks_per_host < self._world_size or not native_available():
            return pairwise
        return _SharedMemory(pool, pairwise, own_nbytes(self._world_size, largest_bytes))


def _gather(bucket: GradBucket, turn: int, exchange: Exchange) -> None:
    """What ParamGather has exchanges do."""
    dtype, bounds = bucket.params[0].param.dtype, bucket.layout.bounds
    direct = exchange.direct(dtype)
    if direct is not None:
        direct.gather_runs(_IDENT._replace(sequence=turn), bucket.param_runs(), bounds)()
    else:
        exchange.staging(bucket.layout.numel, dtype, bucket.device, turn % (exchange.gathers_ahead + 1))
