"""Rows of an estimate: the bytes that each part of an optimizer says it will hold on a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..comm.pieces import LARGE_LANES, flow_of
from ..kernels.adam_state import role_numel, state_dtypes
from ..kernels.functions import ADAM
from ..layout import BucketLayout, ParamSpec, plan_flat, plan_whole_params
from ..optimizer.config import Config
from ..placement.compact_state import is_compact
from ..placement.memory import DEVICE, MemoryInputs, Tally
from ..policies import AlreadyReduced, Overlapped
from ..reduction import bucket_mb_of
from ..sharding.buckets import GradBucket, number_pieces
from ..sharding.step_cost import cost_of_step
from ..sharding.wrapped_class import is_elementwise
from ..state.trial import StateSizes
from ..system.devices import HOST, is_host
from .dry_run import Sketch, staging_nbytes

# NCCL's buffers and contexts depend on version, links and ranks; this is the order of magnitude.
_COMMUNICATOR_NBYTES = 100 << 20


class Row(NamedTuple):
    """Bytes of one thing.

    Attributes:
        kind: ``params``; ``grads``, that autograd makes; ``grad_shards`` and ``staging``, on their way to other ranks
            and from them; ``state``, in the state dict; ``masters``; ``buffers``, all other; ``communicator``, about
            what a backend such as NCCL allocates by itself, outside of torch's allocator.
        where: ``device``, the parameters', whichever that is; ``host``; ``nvme``.
        name: what exactly; of state, the key.
    """

    kind: str
    where: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class Sizing:
    """What an optimizer is made of, its parameters as sketches; and what follows from that.

    Attributes:
        sketches: every parameter, by global index. trainable: indices of those that are planned.
        hypers: of every param group, as the wrapped class completes them.
        stages: how many the collectives of accelerators go in.
    """

    sketches: Mapping[int, Sketch]
    trainable: Sequence[int]
    hypers: Sequence[Mapping[str, Any]]
    world_size: int
    ranks_per_host: int
    config: Config
    stages: int = 1

    @cached_property
    def _sizes(self) -> StateSizes:
        return StateSizes(self.config.optimizer_class, self.config.defaults)

    @cached_property
    def _layouts(self) -> list[BucketLayout]:
        """The plan, as the optimizer will make it."""
        config, specs = self.config, dict[int, ParamSpec]()
        for index in self.trainable:
            sketch = self.sketches[index]
            specs[index] = sketch.flat.spec(sketch.group)._replace(device=str(sketch.device))
        bucket_bytes, cls, mixed = self._bucket_mb * 2**20, config.optimizer_class, config.placement.mixes_groups
        if is_elementwise(cls):
            return plan_flat(specs, self.world_size, bucket_bytes, mixed=mixed)
        costs = {index: cost_of_step(cls, self.sketches[index].flat.shape) for index in specs}
        return plan_whole_params(specs, self.world_size, bucket_bytes, costs=costs, mixed=mixed)

    @property
    def _bucket_mb(self) -> float:
        return bucket_mb_of(self.config.reduction, between_hosts=self._between_hosts)

    @property
    def _in_host_memory(self) -> bool:
        return self.world_size > 1 and all(is_host(sketch.device) for sketch in self.sketches.values())

    @property
    def _between_hosts(self) -> bool:
        return self._in_host_memory and self.ranks_per_host < self.world_size

    @property
    def _by_messages(self) -> bool:
        """Whether buckets go from some ranks to others by messages."""
        return self._between_hosts or (self._in_host_memory and self.config.reduction.exchange == "backend")

    def fullest_rank(self) -> int:
        """The rank that needs most: whose shards have the most elements; of several the first."""
        loads = [0] * self.world_size
        if not steps_alone(self.world_size, self.config):
            for bounds in (plan.bounds for plan in self._layouts if not isinstance(plan.bounds, range)):  # else alike
                for rank, (start, stop) in enumerate(pairwise(bounds)):
                    loads[rank] += stop - start
        return loads.index(max(loads))

    def buckets(self, rank: int) -> list[GradBucket]:
        """A rank's buckets, on the meta device."""
        dtypes = (self.config.precision.reduce_dtype, self.config.precision.accumulate_dtype)
        flats = {index: sketch.flat for index, sketch in self.sketches.items()}
        flow = flow_of(self._bucket_mb)
        buckets = [
            GradBucket(plan, [flats[index] for index in plan.params], rank, *dtypes, flow=flow)
            for plan in self._layouts
        ]
        number_pieces(buckets)
        return buckets

    def rows(self, rank: int) -> tuple[Row, ...]:
        """What a rank holds between two steps, and gradients."""
        with HOST:  # whatever the caller's default device, stand-ins need values
            tally = Tally({("params", DEVICE, "parameters"): _nbytes(self.sketches.values())})
            if steps_alone(self.world_size, self.config):
                self._add_alone(tally)
            else:
                self._add_sharded(tally, rank)
        return tuple(Row(*place, nbytes) for place, nbytes in tally.items() if nbytes)

    @property
    def _grads_nbytes(self) -> int:
        return _nbytes(self.sketches[index] for index in self.trainable)

    def _state_nbytes(self, group: int, shape: Sequence[int], dtype: torch.dtype) -> Mapping[str, int]:
        form = self.config.placement.inputs.form
        if not is_compact(form):
            return self._sizes.of(group, self.hypers[group], shape, dtype)
        dtypes = state_dtypes(replace(form, master=None), ADAM.roles(self.hypers[group]))
        sizes = {role: role_numel(role, math.prod(shape)) * of_role.itemsize for role, of_role in dtypes.items()}
        return {"step": torch.float32.itemsize, **sizes}

    def _add_alone(self, tally: Tally) -> None:
        tally["grads", DEVICE, "gradients"] = self._grads_nbytes
        for index in self.trainable:
            flat, group = self.sketches[index].flat, self.sketches[index].group
            for key, nbytes in self._state_nbytes(group, flat.param.shape, flat.param.dtype).items():
                tally["state", DEVICE, key] += nbytes

    def _add_sharded(self, tally: Tally, rank: int) -> None:
        buckets, config = self.buckets(rank), self.config
        staging = staging_nbytes(
            buckets, rank, self.world_size, config.reduction, config.precision, ranks_per_host=self.ranks_per_host
        )
        tally["staging", DEVICE, "staging"] = staging
        for bucket in buckets:  # nothing of them is allocated any more
            bucket.device = torch.device(bucket.layout.device)
        self._add_grads(tally, buckets)
        if self.world_size > 1:
            self._add_on_accelerators(tally, [bucket for bucket in buckets if not is_host(bucket.device)])
        mirrored = (self.sketches[index] for index in self.trainable if self.sketches[index].flat.mirrored)
        tally["buffers", DEVICE, "copies without gaps"] = _nbytes(mirrored)
        inputs = MemoryInputs(self.hypers, self._state_nbytes, self.ranks_per_host)
        tally.update(self.config.placement.memory(buckets, inputs))

    def _add_grads(self, tally: Tally, buckets: Sequence[GradBucket]) -> None:
        """Add all gradients, or, where buckets let go of them, those of the buckets that fill and are under way."""
        if not isinstance(self.config.reduction, Overlapped):
            tally["grads", DEVICE, "gradients"] = self._grads_nbytes
            return
        sizes = [sum(flat.param.nbytes for flat in bucket.params) for bucket in buckets]
        held = 2 * max(sizes, default=0)
        if self._by_messages:  # those that may be under way, and of the others the one that fills
            under_way, others = 0, [0]
            for cut, lanes in ((True, LARGE_LANES), (False, flow_of(self._bucket_mb).lanes)):
                alike = sorted(size for size, bucket in zip(sizes, buckets, strict=True) if (bucket.pieces > 1) is cut)
                under_way, others = under_way + sum(alike[-lanes:]), others + alike[:-lanes]
            held = under_way + max(others)
        tally["grads", DEVICE, "gradients on their way"] = min(held, self._grads_nbytes)

    def _add_on_accelerators(self, tally: Tally, buckets: Sequence[GradBucket]) -> None:
        """Add what exchanges of accelerator tensors take while they keep up with backward: two staged buckets; besides,
        the communicators, if the process group has any. Of two stages, also a bucket in the order of places and the
        means of one host; see :class:`HierarchicalBackendExchange`.
        """
        if not buckets:
            return
        tally["communicator", DEVICE, "NCCL or alike, about"] = self.stages * _COMMUNICATOR_NBYTES
        if isinstance(self.config.reduction, AlreadyReduced):
            return
        staged = {bucket: bucket.layout.numel * bucket.dtype.itemsize for bucket in buckets}
        tally["grads", DEVICE, "staged gradients"] = min(2 * max(staged.values()), sum(staged.values()))
        equal = [nbytes for bucket, nbytes in staged.items() if isinstance(bucket.layout.bounds, range)]
        if self.stages > 1 and equal:
            tally["grads", DEVICE, "gradients by place"] = max(equal) + max(equal) // self.ranks_per_host


def steps_alone(world_size: int, config: Config) -> bool:
    """Whether the wrapped class works by itself, without anything of ours."""
    return world_size == 1 and not config.has_masters


def _nbytes(sketches: Iterable[Sketch]) -> int:
    return sum(sketch.flat.param.nbytes for sketch in sketches)
