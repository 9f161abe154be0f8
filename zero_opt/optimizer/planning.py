"""The way of parameters into the engine: ranks compare param groups, plan buckets, and take memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from ..comm.backend_exchanges import build_exchange
from ..errors import ZeroOptError
from ..layout import indices_of, mask_of
from ..policies import AlreadyReduced
from ..sharding.param_groups import PlannedGroups
from ..sharding.step_cost import cost_of_step
from ..sharding.wrapped_class import require_real_if_fused
from ..state.stand_ins import kinds_of
from ..system.devices import is_host
from ..system.failures import on_failure
from ..system.freed_memory import keep_freed
from .contents import contents, value_contents
from .parts import EngineParts


class Planner:
    """Takes in param groups, and plans their parameters that are trainable or have a gradient.

    A planned parameter does not move. Methods are collective.

    Attributes:
        planned: the parameters of every group that was taken in.
    """

    def __init__(self, parts: EngineParts, planned: PlannedGroups) -> None:
        self._parts, self.planned = parts, planned
        self._group_of: list[int] = []
        self._costs: dict[int, float] = {}  # of the step of each parameter, where they are whole
        self._known_groups = 0
        # Whether ranks must have equal values when they plan parameters. Under DDP they need not: it may come later.
        already_reduced = isinstance(parts.config.reduction, AlreadyReduced)
        self._values_count = parts.groups.control.world_size > 1 and not already_reduced

    def add_groups(self) -> None:
        """Take in the owner's new param groups, after comparing them with the other ranks'.

        Raises:
            RankMismatch: they differ, or what steps cost. ConfigError: :func:`register_cost` was given no cost.
            OutOfMemory, WorkerFailed, StorageFailed: no room. Nothing was taken in.
            OutOfResources: a rank has no descriptors for a worker, or no threads to serve its state with.
        """
        parts, params = self._parts, self._parts.params
        groups = parts.param_groups
        parts.gather.flush()
        listed = contents(groups, self._known_groups, parts.describe, values=self._values_count)
        added = [param for group in groups[self._known_groups :] for param in group["params"]]
        parts.agreement.require_same_contents(chain(listed, self._cost_contents(added)))
        parts.agreement.reserve(sum(len(group["params"]) for group in groups))
        before = len(params)
        try:
            for number in range(self._known_groups, len(groups)):
                parts.placement.add_group(groups[number])
                params.extend(groups[number]["params"])
                self._group_of.extend([number] * len(groups[number]["params"]))
            self._plan(self._missing(mask_of(i for i, param in enumerate(params) if param.requires_grad)))
        except BaseException:
            del params[before:], self._group_of[before:]
            self._costs = {index: cost for index, cost in self._costs.items() if index < before}
            parts.placement.drop_groups(self._known_groups)
            raise
        self.planned.add()
        parts.reduction.hook_params()
        self._known_groups = len(groups)
        parts.guard.commit(parts.count.step)
        with parts.agreement.together():  # until it serves, a rank can tell the others of no error but like this
            parts.groups.serve(parts.guard, parts.placement, parts.partition)
        parts.groups.end_construction()

    def _cost_contents(self, added: Sequence[Tensor]) -> Iterator[tuple[str, Any]]:
        """Note what the step of each added parameter costs. Yield it as ranks compare it: owners follow from it."""
        parts = self._parts
        for index, param in enumerate(added if parts.partition.whole else (), len(parts.params)):
            self._costs[index] = cost_of_step(parts.config.optimizer_class, param.shape)
            yield f"cost of the step of {parts.describe(index)}", self._costs[index]

    def plan(self, mask: int) -> None:
        """Plan the masked parameters that are not planned yet; the mask is the same on every rank.

        Raises:
            RankMismatch: values differ between ranks, as those of frozen parameters may.
            UnsupportedParam, ConfigConflict: on every rank, if one cannot be stepped.
        """
        missing = self._missing(mask)
        if missing:
            labeled = [(self._parts.describe(i), self._parts.params[i]) for i in missing]
            with self._parts.agreement.together():
                require_real_if_fused(self._parts.config.optimizer_class, self._parts.param_groups, missing)
                for label, param in labeled:
                    self._parts.config.placement.check_param(param, label)
            if self._values_count:
                self._parts.agreement.require_same_contents(value_contents(labeled))
            self._plan(missing)

    def make_room(self) -> None:
        """Make room for state that edited hyperparameters need. Not collective.

        Raises:
            UnsupportedOptimizer, ConfigConflict: they cannot be stepped. OutOfMemory, WorkerFailed, StorageFull,
            StorageFailed: no room; all is as it was. PeerLost: another rank reads the state for too long.
        """
        parts = self._parts
        if parts.placement.lacks_room(parts.param_groups):
            with parts.guard.moving(parts.patience_s), parts.visible.lock:
                parts.placement.make_room(parts.param_groups)
                parts.visible.note_entries()

    def make_room_for_edits(self, fit: Callable[[], bool]) -> None:
        """Make room for arrays that the user has put into state, and that edited hyperparameters need. Not collective.

        Args:
            fit: whether the hyperparameters fit the state as it is in the user's hands.

        Raises:
            OutOfMemory and others: as :meth:`make_room`.
        """
        placement, lacks = self._parts.placement, False
        with suppress(ZeroOptError):  # the check before the step raises it
            lacks = not placement.pending and fit() and placement.lacks_room(self._parts.param_groups)
        if lacks:
            self.make_room()

    def _missing(self, mask: int) -> list[int]:
        """Return the masked parameters that are not planned yet."""
        return sorted(indices_of(mask) - self._parts.partition.flats.keys())

    def _plan(self, missing: Sequence[int]) -> None:
        if missing:
            with self._parts.guard.changing(self._parts.patience_s, self._parts.count.step):
                self._add_buckets(missing)

    def _add_buckets(self, missing: Sequence[int]) -> None:
        """Put parameters into new buckets, and let every part of the engine take those in.

        The placement comes before the reduction, which reads the shards of buckets that the placement does not read;
        see :attr:`GradBucket.reader`.
        """
        parts, config = self._parts, self._parts.config
        of_group = [(i, self._group_of[i], parts.params[i]) for i in missing]
        added = parts.partition.add(of_group, self._costs)
        with on_failure(partial(parts.partition.drop, added)), on_failure(partial(parts.placement.drop, added)):
            self._connect()
            with parts.agreement.together():
                parts.placement.add(added)
        parts.reduction.watch(added)
        for bucket in added:
            bucket.reserve_staging(parts.pool)
        on_host = [bucket for bucket in parts.partition.buckets if is_host(bucket.device)]
        keep_freed(sum(flat.param.nbytes for bucket in on_host for flat in bucket.params))
        parts.gather.forget()  # the views of staging buffers that are replaced
        parts.gather.watch()
        with parts.visible.lock:
            parts.visible.add(kinds_of(config.placement, of_group))

    def _connect(self) -> None:
        """Make an exchange for each device type that has none yet."""
        parts, groups = self._parts, self._parts.groups
        by_type = {bucket.device.type: bucket.device for bucket in parts.partition.buckets}
        for device_type in sorted(by_type):
            if device_type not in parts.exchanges:
                sizes = (b.staging_nbytes for b in parts.partition.buckets if b.device.type == device_type)
                host_bytes = max(sizes) if parts.config.reduction.exchange == "auto" else 0
                used = (groups.control, groups.reduce, groups.gather)
                between_hosts = parts.config.precision.between_hosts_dtype
                made = build_exchange(
                    by_type[device_type], used, parts.pool, host_bytes=host_bytes, between_hosts=between_hosts
                )
                parts.exchanges[device_type] = made
