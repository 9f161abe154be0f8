"""The plan bound to tensors: which parameters are sharded, in which buckets, and who owns what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..comm.groups import Group
from ..comm.pieces import flow_of
from ..layout import BucketLayout, ParamSlice, ParamSpec, plan_flat, plan_whole_params
from ..policies import MixedPrecision
from ..system.devices import build_streams
from ..system.placing import placing_of
from ..system.streams import Streams
from .buckets import GradBucket, number_pieces
from .flat_param import (
    FlatParam,
    check_params_apart,
    check_trainable,
    edits_of,
    grad_dtypes_of,
    moved_of,
    share_counters,
)


class Partition:
    """All sharded parameters and buckets of one optimizer on one rank.

    Attributes:
        flats: sharded parameters by global index. Frozen ones are absent until they are unfrozen.
        buckets: in plan order; grows, never changes.
        places: global parameter index -> (bucket index, position in that bucket).
        streams: by device.
        whole: every parameter belongs to one rank, rather than be cut anywhere.

    Args:
        describe: names a parameter, given its global index. bucket_mb: bucket size in MiB.
        precision: has the dtypes of gradient buckets. mixed: as for :func:`plan_flat`.
    """

    def __init__(
        self,
        group: Group,
        describe: Callable[[int], str],
        whole: bool,
        bucket_mb: float,
        precision: MixedPrecision,
        *,
        mixed: bool = False,
    ) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.describe, self.whole, self._bucket_mb, self._precision = describe, whole, bucket_mb, precision
        self._mixed = mixed
        self.flats: dict[int, FlatParam] = {}
        self.buckets: list[GradBucket] = []
        self.places: dict[int, tuple[int, int]] = {}
        self.streams: dict[torch.device, Streams] = {}
        self._known_edits: list[int] = []  # as of the last accept_edits(), by parameter in the order of ``flats``
        self._moved: set[int] = set()
        self._params: list[Tensor] = []  # of ``flats``
        self._facts: list[object] = []  # of the parameters, when none was found to have moved

    def add(self, params: Sequence[tuple[int, int, Tensor]], costs: Mapping[int, float]) -> list[GradBucket]:
        """Plan more parameters, given as (global index, param group, parameter). Return the new buckets.

        Args:
            costs: what the step of each parameter costs, of those planned before too, by global index; not read unless
                parameters are whole.
        """
        for index, _, param in params:
            check_trainable(param, self.describe(index))
        flats = {index: FlatParam(param, self.describe(index)) for index, _, param in params}
        specs = {index: flats[index].spec(group) for index, group, _ in params}
        layouts = self._plan(specs, costs)
        share_counters(self.flats.values(), list(flats.values()))
        self.flats.update(flats)
        self._known_edits += edits_of(flats.values())
        self._note_params()
        added = []
        for layout in layouts:
            members = [flats[index] for index in layout.params]
            dtypes = (self._precision.reduce_dtype, self._precision.accumulate_dtype)
            device = members[0].param.device
            streams = self.streams.setdefault(device, build_streams(device))
            added.append(GradBucket(layout, members, self.rank, *dtypes, streams, flow_of(self._bucket_mb)))
            self.places.update({index: (layout.index, at) for at, index in enumerate(layout.params)})
        self.buckets.extend(added)
        number_pieces(self.buckets)
        return added

    def drop(self, added: Sequence[GradBucket]) -> None:
        """Take back the last :meth:`add`."""
        del self.buckets[len(self.buckets) - len(added) :]
        for bucket in added:
            for index in bucket.layout.params:
                del self.flats[index], self.places[index]
        del self._known_edits[len(self.flats) :]
        self._note_params()

    def _note_params(self) -> None:
        """Follow a change of :attr:`flats`: what is known of all parameters at once has to be found out anew."""
        self._params, self._facts = [flat.param for flat in self.flats.values()], []

    def _plan(self, specs: dict[int, ParamSpec], costs: Mapping[int, float]) -> list[BucketLayout]:
        bucket_bytes, first = self._bucket_mb * 2**20, len(self.buckets)
        if not self.whole:
            return plan_flat(specs, self.world_size, bucket_bytes, first, mixed=self._mixed)
        loads = self._loads(costs)
        costs = {index: costs[index] for index in specs}
        return plan_whole_params(specs, self.world_size, bucket_bytes, first, loads, costs=costs, mixed=self._mixed)

    def _loads(self, costs: Mapping[int, float]) -> list[float]:
        """Return what the steps of the parameters that each rank owns cost together; parameters are whole."""
        shares: list[list[float]] = [[] for _ in range(self.world_size)]
        for bucket in self.buckets:
            for position, index in enumerate(bucket.layout.params):
                shares[bucket.layout.owner(position)].append(costs[index])
        return [math.fsum(share) for share in shares]

    def owned(self) -> list[ParamSlice]:
        """Return this rank's slices, bucket by bucket."""
        return [piece for bucket in self.buckets for piece in bucket.slices]

    def owner_of_start(self, index: int) -> int:
        """Return the rank that owns a parameter's first element: the scalars of its state count as the parameter's."""
        bucket, position = self.places[index]
        return self.buckets[bucket].layout.owner(position)

    def join(self) -> None:
        """Make the current stream of each device wait for the shards, and later reductions wait for that stream."""
        for device, streams in self.streams.items():
            streams.join([shard for bucket in self.buckets if bucket.device == device for shard in bucket.own_shards])

    def _facts_now(self) -> list[object]:
        return [*placing_of(self._params), grad_dtypes_of(self._params)]

    def _moved_now(self) -> list[int]:
        """Return the indices of re-pointed parameters; raise what :meth:`refresh` does."""
        moved = moved_of(self.flats)
        if moved:
            flats = [*self.flats.values()]
            check_params_apart([flat.param for flat in flats], lambda position: flats[position].label)
        return moved

    def require_fitting(self) -> None:
        """Raise what :meth:`refresh` does; follow no parameter."""
        if self._facts_now() != self._facts:
            self._moved_now()

    def refresh(self) -> list[int]:
        """Follow parameters whose data was re-pointed. Returns their indices.

        Raises:
            UnsupportedParam: one does not fit any more, shares memory with another, or has gradients of another dtype;
                none was followed.
        """
        facts = self._facts_now()
        if facts == self._facts:
            return []
        moved = self._moved_now()
        for index in moved:
            self.flats[index].remake_views()
        self._moved.update(moved)
        self._facts = facts
        return moved

    def edits(self) -> dict[int, int]:
        """Return how often the user has written to or re-pointed each parameter since it was added or accept_edits().

        In ascending order of parameters, without those that the user has not written to. Empty at world size 1.
        """
        if self.world_size == 1:
            return {}
        edits = edits_of(self.flats.values())
        if edits == self._known_edits and not self._moved:
            return {}
        writes = zip(self.flats, edits, self._known_edits, strict=True)
        counts = {index: now - was + (index in self._moved) for index, now, was in writes}
        return {index: counts[index] for index in sorted(counts) if counts[index]}

    def count_edit(self, indices: Iterable[int]) -> None:
        """Take parameters as written to by the user once more."""
        params = [self.flats[index].param for index in indices]
        torch.autograd.graph.increment_version([param for param in params if not param.is_inference()])

    def accept_edits(self) -> None:
        """Start to count edits again: parameters are equal on all ranks, or will be once every gather has ended."""
        if self.world_size > 1:
            self._known_edits, self._moved = edits_of(self.flats.values()), set()
