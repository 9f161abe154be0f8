"""The plan of who owns which elements, in pure integers: the same specs give the same plan on every rank.

Parameters go into buckets in reverse registration order (about the order in which backward finishes them). Inside a
bucket each parameter starts at a multiple of :data:`ALIGN` elements, and so does each rank's shard, so every cut inside
a parameter is at a multiple of :data:`ALIGN` too: a vectorized elementwise kernel sees whole vectors on both sides.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, overload

ALIGN = 64
# Buckets of at most this part of the largest size may share one with those of other param groups.
_SMALL_PART = 1 / 16
# What bytes 0 and 1 are as digits.
_DIGITS = bytes.maketrans(b"\0\1", b"01")


def mask_of(indices: Iterable[int]) -> int:
    """Return an integer with a bit set per index."""
    listed = list(indices)
    digits = bytearray(b"0") * (max(listed, default=0) + 1)
    for index in listed:
        digits[-1 - index] = ord("1")
    return int(digits, 2)


def mask_of_flags(flags: Iterable[bool]) -> int:
    """Return an integer with a bit set per index of a flag that is true."""
    return _mask_of_bytes(bytes(flags))


@lru_cache(maxsize=16)
def _mask_of_bytes(flags: bytes) -> int:
    return int(b"0" + flags[::-1].translate(_DIGITS), 2)


@lru_cache(maxsize=16)
def indices_of(mask: int) -> frozenset[int]:
    """Return the indices of the bits that are set in ``mask``."""
    return frozenset(index for index, digit in enumerate(reversed(bin(mask)[2:])) if digit == "1")


class ParamSpec(NamedTuple):
    """What a planner knows of one parameter. Parameters share a bucket only if dtype and device agree.

    So must their param groups, except that small buckets of several groups may be made one.
    """

    numel: int
    itemsize: int
    group: int
    dtype: str
    device: str


class Span(NamedTuple):
    """A range of elements, ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class ParamSlice(NamedTuple):
    """The part of one parameter that lies in one rank's shard of a bucket.

    ``param`` and ``group`` are global indices; the spans are in elements: of the parameter in storage order, of the
    bucket, and of the rank's shard of that bucket.
    """

    param: int
    group: int
    in_param: Span
    in_bucket: Span
    in_shard: Span


@dataclass(frozen=True)
class OwnerBounds(Sequence[int]):
    """The ``world_size + 1`` shard bounds of a bucket of which few ranks own a part, kept for these ranks only.

    Attributes:
        owners: ranks whose shard is not empty, ascending.
        ends: where each owner's shard ends.
    """

    world_size: int
    owners: tuple[int, ...]
    ends: tuple[int, ...]

    def __len__(self) -> int:
        return self.world_size + 1

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [self[rank] for rank in range(*at.indices(len(self)))]
        rank = range(len(self))[at]
        before = bisect_left(self.owners, rank)
        return self.ends[before - 1] if before else 0


@dataclass(frozen=True)
class BucketLayout:
    """The plan of one bucket: which parameters, where, and where each rank's shard begins.

    Attributes:
        index: position among all buckets of the optimizer; never changes once given.
        params: global parameter indices in bucket order. groups: the number of each one's param group.
        offsets: first element of each parameter in the bucket, multiples of :data:`ALIGN`, ascending.
        numels: elements of each parameter.
        bounds: ``world_size + 1`` ascending element offsets; rank r owns ``bounds[r]`` to ``bounds[r + 1]``.
    """

    index: int
    dtype: str
    device: str
    params: tuple[int, ...]
    groups: tuple[int, ...]
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    bounds: Sequence[int]

    @property
    def group(self) -> int:
        """The number of the param group of all parameters, where buckets are not mixed."""
        return self.groups[0]

    def params_in(self, indices: frozenset[int]) -> tuple[int, ...]:
        """Return those of :attr:`params` that are among ``indices``."""
        if indices.issuperset(self.params):
            return self.params
        return tuple(index for index in self.params if index in indices)

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.bounds[-1]

    def shard(self, rank: int) -> Span:
        """Return the elements of the bucket that ``rank`` owns."""
        return Span(self.bounds[rank], self.bounds[rank + 1])

    def slices(self, rank: int) -> tuple[ParamSlice, ...]:
        """Return the parameter slices in ``rank``'s shard, in bucket order.

        A zero-size parameter belongs, as an empty slice, to the one rank whose shard holds its offset.
        """
        shard = self.shard(rank)
        first = max(bisect_right(self.offsets, shard.start) - 1, 0)
        last = bisect_left(self.offsets, shard.stop)
        slices = (self._slice_of(position, shard) for position in range(first, last))
        return tuple(piece for piece in slices if piece is not None)

    def owner(self, position: int) -> int:
        """Return the rank whose shard holds the start of the parameter at ``position``."""
        return bisect_right(self.bounds, self.offsets[position]) - 1

    def _slice_of(self, position: int, shard: Span) -> ParamSlice | None:
        offset, numel = self.offsets[position], self.numels[position]
        start, stop = max(offset, shard.start), min(offset + numel, shard.stop)
        if start > stop or (start == stop and (numel or not shard.start <= offset < shard.stop)):
            return None
        return ParamSlice(
            self.params[position],
            self.groups[position],
            Span(start - offset, stop - offset),
            Span(start, stop),
            Span(start - shard.start, stop - shard.start),
        )


def aligned(numel: int) -> int:
    """Return ``numel`` rounded up to a multiple of :data:`ALIGN`."""
    return -(-numel // ALIGN) * ALIGN


def footprint(numel: int) -> int:
    """Return how many bucket elements a parameter takes. An empty one takes a place too, so that one rank owns it."""
    return max(aligned(numel), ALIGN)


def _chunks(specs: Mapping[int, ParamSpec], bucket_bytes: float, *, mixed: bool) -> list[list[int]]:
    """Return parameter indices per bucket, in the order in which the buckets fill up.

    Args:
        mixed: small buckets that follow each other are made one.
    """
    open_chunks = defaultdict[tuple[int, str, str], list[int]](list)
    open_bytes = Counter[tuple[int, str, str]]()
    closed: list[list[int]] = []
    for param in sorted(specs, reverse=True):
        spec = specs[param]
        key = (spec.group, spec.dtype, spec.device)
        size = footprint(spec.numel) * spec.itemsize
        if key in open_chunks and open_bytes[key] + size > bucket_bytes:
            closed.append(open_chunks.pop(key))
            del open_bytes[key]
        open_chunks[key].append(param)
        open_bytes[key] += size
    closed.extend(open_chunks.values())
    # A bucket is complete when its last parameter, the earliest registered, is.
    chunks = sorted(closed, key=lambda chunk: -chunk[-1])
    return _together(chunks, specs, bucket_bytes) if mixed else chunks


def _together(chunks: Iterable[list[int]], specs: Mapping[int, ParamSpec], bucket_bytes: float) -> list[list[int]]:
    """Join small chunks of one dtype and device that follow each other, as far as they fit into a bucket."""
    joined: list[list[int]] = []
    last: tuple[str, str] | None = None
    room = 0.0
    for chunk in chunks:
        first = specs[chunk[0]]
        size = sum(footprint(specs[param].numel) * specs[param].itemsize for param in chunk)
        small = size <= bucket_bytes * _SMALL_PART
        if small and (first.dtype, first.device) == last and size <= room:
            joined[-1].extend(chunk)
            room -= size
        else:
            joined.append(list(chunk))
            last, room = (first.dtype, first.device) if small else None, bucket_bytes - size
    return joined


def _bucket_layout(
    index: int, chunk: Sequence[int], specs: Mapping[int, ParamSpec], bounds: Sequence[int] | None, world_size: int
) -> BucketLayout:
    *offsets, end = accumulate((footprint(specs[param].numel) for param in chunk), initial=0)
    if bounds is None:
        shard_numel = aligned(-(-end // world_size))
        bounds = range(0, shard_numel * world_size + 1, shard_numel)
    spec = specs[chunk[0]]
    numels = tuple(specs[param].numel for param in chunk)
    groups = tuple(specs[param].group for param in chunk)
    return BucketLayout(index, spec.dtype, spec.device, tuple(chunk), groups, tuple(offsets), numels, bounds)


def plan_flat(
    specs: Mapping[int, ParamSpec], world_size: int, bucket_bytes: float, first_index: int = 0, *, mixed: bool = False
) -> list[BucketLayout]:
    """Cut every bucket into equal shards, wherever that falls. For elementwise optimizers.

    Args:
        specs: parameters to plan, by global index. Parameters planned earlier are not given again: a plan for an
            added group starts at ``first_index`` and moves nothing.
        world_size: number of ranks.
        bucket_bytes: a bucket is closed before it would exceed this; a larger parameter is alone in its bucket.
        mixed: small buckets of several param groups are made one.
    """
    chunks = _chunks(specs, bucket_bytes, mixed=mixed)
    return [_bucket_layout(first_index + i, chunk, specs, None, world_size) for i, chunk in enumerate(chunks)]


def assign_owners(costs: Mapping[int, float], loads: Iterable[float]) -> dict[int, int]:
    """Return the owner of each whole parameter: the most expensive first, to the least loaded rank.

    With all loads zero the largest load is within 4/3 - 1/(3W) of the optimum (Graham, "Bounds on multiprocessing
    timing anomalies", 1969, theorem 2); on top of earlier loads within 2 - 1/W (theorem 1).
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners: dict[int, int] = {}
    for param in sorted(costs, key=lambda p: (-costs[p], p)):
        load, rank = heap[0]
        owners[param] = rank
        heapq.heapreplace(heap, (load + costs[param], rank))
    return owners


def plan_whole_params(
    specs: Mapping[int, ParamSpec],
    world_size: int,
    bucket_bytes: float,
    first_index: int = 0,
    loads: Sequence[float] | None = None,
    *,
    costs: Mapping[int, float] | None = None,
    mixed: bool = False,
) -> list[BucketLayout]:
    """Give every parameter to one rank, whole; shards differ in size. For optimizers that need the tensor's shape.

    Args:
        loads: what each rank has to do already, from earlier plans; ``None`` is nothing.
        costs: what the step of each parameter costs, in the unit of ``loads``; ``None``: its elements.

    The other arguments are those of :func:`plan_flat`.
    """
    by_numel = {param: spec.numel for param, spec in specs.items()}
    owners = assign_owners(by_numel if costs is None else costs, loads or [0] * world_size)
    buckets = []
    for i, chunk in enumerate(_chunks(specs, bucket_bytes, mixed=mixed)):
        ordered = sorted(chunk, key=lambda p: (owners[p], -p))
        ends: dict[int, int] = {}
        for param, end in zip(ordered, accumulate(footprint(specs[p].numel) for p in ordered)):
            ends[owners[param]] = end
        bounds = OwnerBounds(world_size, tuple(ends), tuple(ends.values()))
        buckets.append(_bucket_layout(first_index + i, ordered, specs, bounds, world_size))
    return buckets
