"""What every part of an optimizer holds on a rank, row by row, from a plan alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..kernels.adam_state import HALVES, MOMENTS
from ..kernels.threads import allowed_threads
from ..layout import ParamSlice
from ..optimizer.config import Config
from ..placement import grad_buffers_of
from ..placement.adam_rules import MAXIMUM
from ..placement.in_process.host_offload import HostUnits, room_for
from ..placement.nvme.extents import Extent, extents_of
from ..placement.nvme.window_pass import BUFFERS
from ..placement.selective.column_shard import columns_of, home_bucket
from ..placement.selective.placement import matrix_members
from ..placement.selective.schedule import selected_count
from ..placement.worker.arena_shard import ArenaShard
from ..placement.worker.banked_shard import BankedShard, is_second, is_sums
from ..placement.worker.cores import split_cores
from ..placement.worker.process import control_nbytes
from ..policies import AlreadyReduced, AtStep, CPUOffload, DDPHook, NVMeOffload, Selective, WorkerOffload
from ..sharding.buckets import GradBucket
from ..sharding.partition import Geometry
from ..sharding.wrapped_class import is_elementwise, steps_params_apart
from ..state.trial import StateSizes
from ..system.devices import HOST as HOST_DEVICE
from ..system.devices import is_host
from ..system.shared_memory import page_aligned
from .dry_run import Rehearsal, Sketch

DEVICE, HOST, NVME = "device", "host", "nvme"
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


def steps_alone(world_size: int, config: Config) -> bool:
    """Whether the wrapped class works by itself, without anything of ours."""
    return world_size == 1 and not config.has_masters


Held = Counter[tuple[str, str, str]]


@dataclass(frozen=True)
class Sizing:
    """What an optimizer is made of, its parameters as sketches; and what follows from that.

    Attributes:
        sketches: every parameter, by global index. trainable: indices of those that are planned.
        hypers: of every param group, as the wrapped class completes them.
    """

    sketches: Mapping[int, Sketch]
    trainable: Sequence[int]
    hypers: Sequence[Mapping[str, Any]]
    world_size: int
    ranks_per_host: int
    config: Config

    @cached_property
    def _sizes(self) -> StateSizes:
        return StateSizes(self.config.optimizer_class, self.config.defaults)

    @cached_property
    def _rehearsal(self) -> Rehearsal:
        config = self.config
        dtypes = (config.precision.reduce_dtype, config.precision.accumulate_dtype)
        geometry = Geometry(not is_elementwise(config.optimizer_class), config.reduction.bucket_mb, *dtypes)
        planned = {index: self.sketches[index] for index in self.trainable}
        return Rehearsal(planned, (self.world_size, self.ranks_per_host), config.reduction, geometry)

    def fullest_rank(self) -> int:
        """The rank that needs most."""
        return 0 if steps_alone(self.world_size, self.config) else self._rehearsal.fullest_rank()

    def rows(self, rank: int) -> tuple[Row, ...]:
        """What a rank holds between two steps, and gradients."""
        with HOST_DEVICE:  # whatever the caller's default device, stand-ins need values
            alone = steps_alone(self.world_size, self.config)
            found = [*self._params(), *(self._alone() if alone else self._sharded(rank))]
        return tuple(row for row in found if row.nbytes)

    def _params(self) -> Iterator[Row]:
        yield Row("params", DEVICE, "parameters", _nbytes(self.sketches.values()))

    def _grads(self) -> Row:
        return Row("grads", DEVICE, "gradients", _nbytes(self.sketches[index] for index in self.trainable))

    def _alone(self) -> Iterator[Row]:
        yield self._grads()
        held: Counter[str] = Counter()
        for index in self.trainable:
            flat, group, _ = self.sketches[index]
            held.update(self._sizes.of(group, self.hypers[group], flat.param.shape, flat.param.dtype))
        yield from (Row("state", DEVICE, key, nbytes) for key, nbytes in held.items())

    def _sharded(self, rank: int) -> Iterator[Row]:
        rehearsal = self._rehearsal
        buckets = rehearsal.buckets(rank)
        yield self._passing_grads(buckets)
        yield from self._on_accelerators(buckets)
        yield Row("staging", DEVICE, "staging", rehearsal.staging_nbytes(rank, buckets))
        mirrored = (self.sketches[index] for index in self.trainable if self.sketches[index].flat.mirrored)
        yield Row("buffers", DEVICE, "copies without gaps", _nbytes(mirrored))
        policy = self.config.offload
        into_arena = isinstance(policy, WorkerOffload) and policy.selective is None
        if not into_arena:
            yield Row("grad_shards", DEVICE, "reduced gradients", sum(bucket.shard_nbytes for bucket in buckets))
        if policy is not None and policy.selective is not None:
            yield from self._of_columns(policy, policy.selective, buckets)
        else:
            yield from self._of_home(buckets)

    def _of_home(self, buckets: Sequence[GradBucket]) -> Iterator[Row]:
        """What is kept where the offload policy has it."""
        if isinstance(self.config.offload, WorkerOffload):
            yield from self._of_worker(self.config.offload, self._at_home(buckets))
        elif isinstance(self.config.offload, NVMeOffload):
            yield from self._of_file(self.config.offload, self._at_home(buckets))
        else:
            yield from self._of_units(buckets)

    def _of_columns(
        self, policy: CPUOffload | WorkerOffload | NVMeOffload, selective: Selective, buckets: Sequence[GradBucket]
    ) -> Iterator[Row]:
        """What is stepped by columns, at home and on the device, and beside it what is no matrix."""
        held = Held()
        homes = []
        for bucket in buckets:
            matrices = matrix_members(bucket)
            for at, piece in enumerate(bucket.slices):
                if at in matrices:
                    self._add_columns(held, piece, selective)
                else:
                    self._add_slice(held, piece, DEVICE, stays=True)
            if matrices:
                homes.append(home_bucket(bucket, matrices, "meta"))
        yield from (Row(*place, nbytes) for place, nbytes in held.items())
        sketches = {
            index: Sketch(flat, home.layout.group, HOST_DEVICE)
            for home in homes
            for index, flat in zip(home.layout.params, home.params, strict=True)
        }
        config = replace(self.config, reduction=AlreadyReduced(), offload=replace(policy, selective=None))
        yield Row("buffers", HOST, "copies of columns", _nbytes(sketches.values()))
        if not isinstance(policy, WorkerOffload):
            yield Row("buffers", HOST, "means of gradients", sum(home.shard_nbytes for home in homes))
        for row in Sizing(sketches, sorted(sketches), self.hypers, 1, self.ranks_per_host, config)._of_home(homes):
            is_mean = row.kind == "grad_shards"
            yield row._replace(kind="buffers", name="means of gradients") if is_mean else row

    def _add_columns(self, held: Held, piece: ParamSlice, selective: Selective) -> None:
        """Count what is kept of a matrix's slice beside its home."""
        columns = columns_of(piece, self.sketches[piece.param].flat)
        count, fp32 = selected_count(selective.topk_ratio, columns.total), torch.float32.itemsize
        # A slice within one row has a part of some columns, and so of some of the selected ones: their share of it.
        here = count if columns.width == columns.total else round(count * columns.width / columns.total)
        if count < columns.total or selective.warmup_steps:
            held["staging", HOST, "gradients that wait"] += piece.in_param.numel * fp32
        held["masters", DEVICE, "selected columns"] += here * columns.height * fp32
        keys = [*MOMENTS, *([MAXIMUM] if self.hypers[piece.group]["amsgrad"] else [])]
        for key in keys:
            held["state", DEVICE, key] += here * columns.height * fp32
        # Counts of all columns, and numbers of those selected at all, and of those here.
        held["buffers", HOST, "columns"] += columns.total * fp32 + (count + columns.width) * 8

    def _at_home(self, buckets: Sequence[GradBucket]) -> Sequence[GradBucket]:
        """Buckets that say where their parameters will be, to whoever asks for no tensors there."""
        for bucket in buckets:
            bucket.device = self._rehearsal.device_of(bucket)
        return buckets

    def _passing_grads(self, buckets: Sequence[GradBucket]) -> Row:
        """All gradients, or, where buckets let go of them, two buckets of them."""
        grads = self._grads()
        if isinstance(self.config.reduction, (AtStep, AlreadyReduced, DDPHook)):
            return grads
        sizes = (sum(flat.param.numel() * flat.param.element_size() for flat in bucket.params) for bucket in buckets)
        return Row("grads", DEVICE, "gradients on their way", min(2 * max(sizes, default=0), grads.nbytes))

    def _on_accelerators(self, buckets: Sequence[GradBucket]) -> Iterator[Row]:
        """What exchanges of accelerator tensors take while they keep up with backward: two staged buckets; besides,
        the communicator, if the process group has one.
        """
        there = [bucket for bucket in buckets if not is_host(self._rehearsal.device_of(bucket))]
        if not there or self.world_size == 1:
            return
        yield Row("communicator", DEVICE, "NCCL or alike, about", _COMMUNICATOR_NBYTES)
        if not isinstance(self.config.reduction, AlreadyReduced):
            staged = [bucket.layout.numel * bucket.dtype.itemsize for bucket in there]
            yield Row("grads", DEVICE, "staged gradients", min(2 * max(staged), sum(staged)))

    def _of_units(self, buckets: Sequence[GradBucket]) -> Iterator[Row]:
        """What is stepped by the class or the kernel in this process: parameters in place, masters, copies."""
        policy, held = self.config.offload, Held()
        there = [bucket for bucket in buckets if not is_host(self._rehearsal.device_of(bucket))]
        leaving: Sequence[GradBucket] = there if isinstance(policy, CPUOffload) else ()
        units = HostUnits(policy, self.config.precision.master_dtype) if isinstance(policy, CPUOffload) else None
        staying = units.staying(leaving) if units is not None else set()
        for bucket in buckets:
            home = DEVICE if units is None else HOST
            for piece in bucket.slices:
                if bucket not in leaving:
                    self._add_slice(held, piece, home, stays=True)
                elif piece.param in staying:
                    self._add_slice(held, piece, DEVICE, stays=True, splits=False)
                else:
                    self._add_slice(held, piece, HOST, stays=False)
        if units is not None:
            self._add_lanes(held, units, leaving, staying)
        yield from (Row(*place, nbytes) for place, nbytes in held.items())

    def _add_slice(self, held: Held, piece: ParamSlice, where: str, *, stays: bool, splits: bool = True) -> None:
        """Count what is kept of a slice, beside the parameter or, if it does not stay, in place of it."""
        config, param, numel = self.config, self.sketches[piece.param].flat.param, piece.in_param.numel
        dtype, shape = param.dtype, param.shape if numel == param.numel() else (numel,)
        if config.has_masters and dtype in HALVES:
            split = splits and config.precision.master_dtype == "split" and dtype is torch.bfloat16
            name, itemsize = ("remainder", 2) if split else ("master", 4)
            held["masters", where, name] += numel * itemsize
            if not stays:
                held["buffers", where, "copies of parameters"] += numel * dtype.itemsize
            dtype = torch.float32
        elif not stays:
            held["masters", where, "master"] += numel * dtype.itemsize
        for key, nbytes in self._sizes.of(piece.group, self.hypers[piece.group], shape, dtype).items():
            held["state", where, key] += nbytes

    def _add_lanes(self, held: Held, units: HostUnits, leaving: Sequence[GradBucket], staying: set[int]) -> None:
        """Count what is page-locked beside results: the ends of pages, and the buffers that gradients arrive in."""
        apart = steps_params_apart(self.config.optimizer_class)
        by_device: dict[torch.device, list[GradBucket]] = {}
        for bucket in leaving:
            by_device.setdefault(self._rehearsal.device_of(bucket), []).append(bucket)
        for buckets in by_device.values():
            parts = list(units.leaving(buckets, staying))
            results, grads = room_for(parts)
            owned = sum(
                bucket.slices[at].in_param.numel * bucket.params[0].param.element_size()
                for bucket, members in parts
                for at in members
            )
            held["buffers", HOST, "padding"] += page_aligned(max(results, 1)) - owned
            # One arrives while another is stepped; a class that is not known to step parameters apart has all at once.
            count = min(len(parts), 2) if apart else len(parts)
            held["buffers", HOST, "gradients on their way"] += count * page_aligned(grads)

    def _of_file(self, policy: NVMeOffload, buckets: Sequence[GradBucket]) -> Iterator[Row]:
        extents = [
            (extent, extent.missing(amsgrad=bool(self.hypers[extent.group]["amsgrad"])))
            for extent in (extents_of(buckets) if buckets else ())
        ]
        for extent, roles in extents:
            extent.starts = dict.fromkeys(roles, 0)  # where does not matter
        windows = [extent.window_nbytes(policy.window_mb * 2**20) * len(roles) for extent, roles in extents]
        yield Row("staging", HOST, "windows", BUFFERS * max(windows, default=0))
        yield from _of_extents(extents)

    def _of_worker(self, policy: WorkerOffload, buckets: Sequence[GradBucket]) -> Iterator[Row]:
        held = Held()
        usable = sorted(os.sched_getaffinity(0))
        threads = split_cores(policy, usable, allowed_threads(len(usable)), self.ranks_per_host).threads
        make = BankedShard if policy.speculate else ArenaShard
        # A run is a stretch of neighbors with one step count: as a rule, a bucket.
        start = taken = page_aligned(control_nbytes(threads, len(buckets)))
        for bucket in buckets:
            shard, amsgrad = make(bucket), bool(self.hypers[bucket.layout.group]["amsgrad"])
            arrays = shard.missing(amsgrad=amsgrad, grads=grad_buffers_of(policy, self.config.reduction))
            owned = sum(piece.in_param.numel for piece in bucket.slices)
            for role, dtype in arrays.items():
                place = _place_of(role, in_arena=shard.grads_in_arena)
                whole = place[0] == "grad_shards" or is_sums(role)
                held[place] += (shard.numel_of(role) if whole else owned) * dtype.itemsize
            taken += shard.nbytes_of(arrays)
            held["state", HOST, "step"] += shard.steps.numel() * shard.steps.element_size()
            if not shard.grads_in_arena:
                held["grad_shards", DEVICE, "reduced gradients"] += bucket.shard_nbytes
        in_arena = sum(nbytes for (_, where, name), nbytes in held.items() if where == HOST and name != "step")
        held["buffers", HOST, "control area"] += start
        held["buffers", HOST, "padding"] += page_aligned(taken) - start - in_arena
        yield from (Row(*place, nbytes) for place, nbytes in held.items())


def _of_extents(extents: Iterable[tuple[Extent, Sequence[str]]]) -> Iterator[Row]:
    """What is in the file: arrays of whole blocks."""
    held = Held()
    for extent, roles in extents:
        shards = [shard for _, shard in extent.shards]
        owned = sum(piece.in_param.numel for shard in shards for piece in shard.pieces) * torch.float32.itemsize
        for role in roles:
            held["masters" if role == "master" else "state", NVME, role] += owned
        held["state", HOST, "step"] += sum(shard.steps.numel() * shard.steps.element_size() for shard in shards)
        held["buffers", NVME, "padding"] += (extent.nbytes - owned) * len(roles)
    yield from (Row(*place, nbytes) for place, nbytes in held.items())


def _nbytes(sketches: Iterable[Sketch]) -> int:
    return sum(found.nbytes for found in sketches)


def _place_of(role: str, *, in_arena: bool) -> tuple[str, str, str]:
    """What an array of the arena is, as a kind, a place and a name."""
    if is_second(role):
        return "buffers", HOST, "second bank"
    if is_sums(role):
        return "buffers", HOST, "sums of squares"
    if role == "master":
        return "masters", HOST, role
    if role == "out":
        return "buffers", HOST, "updated parameters"
    if role.startswith("grad"):
        return ("grad_shards", HOST, "reduced gradients") if in_arena else ("buffers", HOST, "copies of gradients")
    return "state", HOST, role
