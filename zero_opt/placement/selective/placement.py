"""Important gradients first: selected columns are stepped at every step on their device, all others now and then.

The others are stepped by the placement of the offload policy, which is given the matrices with the mean gradients of
a window, and knows nothing of selection: of selected columns, what it makes is overwritten. What is no matrix is
stepped on its device too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm.groups import Group
from ...errors import ConfigConflict, StepPending, ZeroOptError
from ...kernels import adam_update_
from ...kernels.functions import ADAM
from ...policies import AdamState, Selective
from ...reduction.interface import GradShard, ParamsByBucket, merged, used_params
from ...sharding.buckets import GradBucket
from ...system.failures import on_failure
from ..in_process.native_steps import NativeSteps
from ..in_process.placement import DevicePlacement
from ..in_process.units import DeviceUnits
from ..interface import ParamState, Placement, SlicePlacement
from ..masters import slices_of
from ..native_rules import WINDOW, new_roles, require_fitting, say_without_masters
from ..read_through import ReadThrough
from .column_slice import ColumnSlice, is_trusted
from .column_state import SavedColumns
from .columns import is_matrix, square_sums
from .schedule import NEVER, Schedule, select_columns, selected_count

# What of a bucket's layout there is one of per parameter.
_PER_PARAM = ("params", "groups", "offsets", "numels")


class SelectivePlacement(Placement):
    """Selected columns on the device, all others in an inner placement.

    Nothing waits when columns are selected, since that is done by the first step of a window, and no step is pending,
    since a step begins by bringing in the one before.

    Args:
        inner: the placement of the offload policy. delay: steps after which its updates arrive.
        threads: how many of this process step; ``None`` is the default.
    """

    def __init__(
        self,
        policy: Selective,
        inner: SlicePlacement[Any],
        group: Group,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        delay: int,
        threads: int | None,
    ) -> None:
        self._policy, self._inner, self._group, self._delay = policy, inner, group, delay
        native = NativeSteps(ADAM, defaults, lambda _: True, threads)
        units = DeviceUnits(AdamState(master="float32"), small_members)
        self._small = DevicePlacement(optimizer_class, defaults, units, native)
        flush_denormals = bool(defaults.get("flush_denormals", False))
        self._update = partial(adam_update_, threads=threads, flush_denormals=flush_denormals)
        self._schedule = Schedule(policy)
        # For the step to come: what is selected, and the buckets whose parameters it changes.
        self._chosen: Mapping[int, Tensor] = {}
        self._updated: ParamsByBucket = {}
        self._buckets: dict[int, GradBucket] = {}
        self._homes: dict[int, GradBucket] = {}  # what the inner placement has of them
        self._slices: dict[int, ColumnSlice] = {}
        self._shown: dict[int, ReadThrough] = {}
        self._roles: list[tuple[str, ...]] = []
        self._waiting: ParamsByBucket = {}  # what has gradients that wait, on whatever rank
        self._arriving: ParamsByBucket = {}  # what is pending, on whatever rank

    # -- what there is ------------------------------------------------------------------------------------------------

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        self._inner.add_group(hypers)
        self._small.add_group(hypers)
        self._roles.append(ADAM.roles(hypers))

    def lacks_room(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        added = new_roles("Selective", ADAM, groups, self._roles)
        return self._inner.lacks_room(groups) or any(added)

    def make_room(self, groups: Sequence[Mapping[str, Any]]) -> None:
        added = new_roles("Selective", ADAM, groups, self._roles)
        if any(added) and self._inner.pending:
            raise ConfigConflict("amsgrad cannot be switched on while a step is pending; call opt.flush() before that")
        before = self._roles
        with on_failure(partial(setattr, self, "_roles", before)):
            self._roles = [(*roles, *more) for roles, more in zip(before, added, strict=True)]
            self._inner.make_room(groups)
        for index, column_slice in self._slices.items():
            if added[column_slice.group] and not column_slice.stepped:
                self._load_slice(index, {})

    def drop_groups(self, kept: int) -> None:
        self._inner.drop_groups(kept)
        self._small.drop_groups(kept)
        del self._roles[kept:]

    def add(self, buckets: Sequence[GradBucket]) -> None:
        homes = home_buckets(buckets)
        self._inner.add(homes)
        self._small.add(buckets)
        self._buckets.update({bucket.layout.index: bucket for bucket in buckets})
        for home in homes:
            self._homes[home.layout.index] = home
            for piece, flat in zip(*slices_of(home), strict=True):
                added = self._slices[piece.param] = ColumnSlice(piece, flat)
                self._shown[piece.param] = ReadThrough(SavedColumns(added, self._schedule))
                self._load_slice(piece.param, {})

    def drop(self, buckets: Sequence[GradBucket]) -> None:
        indices = [bucket.layout.index for bucket in buckets]
        self._inner.drop([self._homes.pop(index) for index in indices if index in self._homes])
        self._small.drop(buckets)
        for bucket in buckets:
            self._buckets.pop(bucket.layout.index, None)
            for index in bucket.layout.params:
                self._slices.pop(index, None)
                self._shown.pop(index, None)

    def repoint(self, params: Sequence[int]) -> None:
        self._small.repoint(params)
        self._inner.repoint(params)
        for index in params:
            if index in self._slices:
                self._slices[index].repoint(0)

    @property
    def staging_nbytes(self) -> int:
        own = sum(column_slice.waiting.nbytes for column_slice in self._slices.values())
        return own + self._inner.staging_nbytes + self._small.staging_nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes of selected columns beside their places at home, and those of the inner placements."""
        own = sum(array.nbytes for column_slice in self._slices.values() for array in column_slice.selected.values())
        return own + self._inner.spare_nbytes + self._small.spare_nbytes

    @property
    def threads(self) -> int | None:
        return self._inner.threads

    def figures(self) -> Mapping[str, float]:
        return self._inner.figures()

    def require_not_forked(self) -> None:
        self._inner.require_not_forked()

    def close(self) -> None:
        self._small.close()
        self._inner.close()

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[int, ParamState]]:
        yield from self._small.state()
        yield from ((index, self._shown[index]) for index, found in self._slices.items() if found.stepped)

    def saved(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        yield from self._small.saved()
        yield from ((i, SavedColumns(found, self._schedule)) for i, found in self._slices.items() if found.stepped)

    def resident(self) -> Iterator[Tensor]:
        yield from self._small.resident()
        for column_slice in self._slices.values():
            yield from column_slice.selected.values()

    def adopt_state(self, index: int, state: ParamState | None) -> bool:
        if index not in self._slices:
            return self._small.adopt_state(index, state)
        shown, column_slice = self._shown[index], self._slices[index]
        if state is shown and not shown.edited():
            shown.forget_live()
            return False
        if state is None and not column_slice.stepped:
            return False
        if self.pending:
            raise StepPending(
                f"the state of {column_slice.flat.label} was changed while a step for it was pending; call "
                "opt.flush() before that"
            )
        if state is not shown:
            shown.forget()
        with shown.settled():
            saved = {} if state is None else dict(state)
            roles = self._roles[column_slice.group]
            require_fitting(column_slice.flat, column_slice.part(0).shape, saved, ADAM, roles)
            self._load_slice(index, saved, column_slice.columns.chosen)
        return state is not shown

    def require_counts(self) -> None:
        self._small.require_counts()

    def param_of(self, index: int) -> Tensor:
        return self._slices[index].part(0) if index in self._slices else self._small.param_of(index)

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state. Collective."""
        self._resume_schedule(states)  # what comes after it may fail on one rank
        self._arriving = {}
        self._roles = [ADAM.roles(group) for group in groups]
        self._small.load({index: state for index, state in states.items() if index not in self._slices}, groups)
        self._inner.load({}, groups)
        without = 0
        for index, column_slice in self._slices.items():
            saved = states.get(index, {})
            self._load_slice(index, saved)
            if "master" in saved:
                column_slice.distrust(0)
            without += bool(saved) and column_slice.param_dtype is not torch.float32 and "master" not in saved
            self._shown[index].forget()
        say_without_masters(without)
        all_params = {index: bucket.layout.params for index, bucket in self._buckets.items()}
        self._waiting = self._those(all_params, matrices=True) if self._schedule.in_window else {}

    def _resume_schedule(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on where training was, of which ranks that have no part of a matrix know nothing. Collective."""
        mine = [0.0, 0.0, 0.0, NEVER, 0.0]  # whether the position is known, and the position
        for index in self._slices:
            saved = states.get(index, {})
            if is_trusted(saved) and WINDOW in saved:
                mine = [1.0, *saved[WINDOW].tolist()[:4]]
                break
            mine[1] = max(mine[1], float(saved.get("step", 0.0)))
        told = self._group.all_gather(torch.tensor(mine, dtype=torch.float64, device="cpu"))
        _, *position = max(part.tolist() for part in told)
        self._schedule.resume(position)

    def _load_slice(self, index: int, saved: Mapping[str, Any], chosen: Tensor | None = None) -> None:
        """Replace the state of a slice; an empty one makes it new.

        Args:
            chosen: the selected columns, if the state does not say so itself. Without them, none; the first ones of a
                new state, if columns are selected by now.
        """
        column_slice = self._slices[index]
        if chosen is None:
            selecting, total = not saved and self._schedule.since_selection >= 0, column_slice.total
            count = selected_count(self._policy.topk_ratio, total) if selecting else 0
            chosen = torch.arange(count, dtype=torch.int64, device="cpu")
        roles = self._roles[column_slice.group]
        self._inner.adopt_state(index, column_slice.state_at_home(saved, roles))
        column_slice.load(saved, dict(self._inner.state())[index], chosen)

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        return self._inner.pending

    @property
    def lags(self) -> bool:
        return self._inner.lags

    def wait(self) -> None:
        self._inner.wait()

    def require_writable(self) -> None:
        self._inner.require_writable()

    def updated_params(self, grads: Sequence[GradShard]) -> ParamsByBucket:
        """The parameters that the next step changes on any rank. Collective where columns are selected."""
        if self._schedule.selects:
            self._select(grads)
        used = used_params(grads)
        if self._schedule.closes and not self._delay:
            used = merged(used, self._waiting)
        elif self._schedule.since_selection < 0 or self._policy.topk_ratio == 0:  # matrices wait
            used = self._those(used, matrices=False)
        self._updated = dict(sorted(merged(used, self._arriving).items()))
        return self._updated

    def _those(self, params: ParamsByBucket, *, matrices: bool) -> ParamsByBucket:
        """Return the matrices among these parameters, or the others."""
        found = {
            index: [
                param
                for param, flat in zip(bucket.layout.params, bucket.params, strict=True)
                if param in params[index] and is_matrix(flat.param) == matrices
            ]
            for index, bucket in self._buckets.items()
            if index in params
        }
        return {index: those for index, those in found.items() if those}

    def _select(self, grads: Sequence[GradShard]) -> None:
        """Choose columns of every matrix, on whatever rank it lies. Collective."""
        totals = {
            index: flat.shape[-1]
            for bucket in self._buckets.values()
            for index, flat in zip(bucket.layout.params, bucket.params, strict=True)
            if is_matrix(flat.param)
        }
        squares = {
            found.index: square_sums(found.flat_grad(0, grad), found.pieces[0], found.flat)
            for found, grad in self._used(grads)
        }
        ratio = self._policy.topk_ratio
        self._chosen, share_left = select_columns(ratio, dict(sorted(totals.items())), squares, self._group)
        self._schedule.selected(share_left)

    def _used(self, grads: Sequence[GradShard]) -> Iterator[tuple[ColumnSlice, Tensor]]:
        """The slices of matrices that have a gradient."""
        for shard in grads:
            for piece, grad in zip(shard.slices, shard.grads, strict=True):
                if piece.param in self._slices and grad is not None:
                    yield self._slices[piece.param], grad

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        closes, left = self._schedule.closes, deque(self._updated)
        self._schedule.stepped()  # also where the step fails: the other ranks count it
        for shown in self._shown.values():
            shown.forget()
        for _ in self.bring_in():
            pass
        for index, column_slice in self._slices.items():
            column_slice.read_param()
            if index in self._chosen and not torch.equal(self._chosen[index], column_slice.columns.chosen):
                column_slice.select(self._chosen[index])
                self._inner.repoint([index])  # masters that it does not show follow the parameter
        self._chosen = {}
        for _ in self._small.step(grads, groups, grad_scale):
            pass
        self._waiting = merged(self._waiting, self._those(used_params(grads), matrices=True))
        for column_slice, grad in self._used(grads):
            column_slice.step(grad, groups[column_slice.group], grad_scale, self._update)
        for bucket in self._close_window(groups) if closes else ():
            while left and left[0] <= bucket:
                yield left.popleft()
        yield from left

    def _close_window(self, groups: Sequence[MutableMapping[str, Any]]) -> Iterator[int]:
        """Let the inner placement step what waits; yields the buckets of which that is in the parameters."""
        self._arriving, self._waiting = self._waiting, {}
        means = []
        for bucket, home in self._homes.items():
            found = self._slices_of(bucket)
            for column_slice in found:
                self._inner.step_by_mean_of(column_slice.index, max(column_slice.gathered, 1))
            grads = [column_slice.take_mean() if column_slice.gathered else None for column_slice in found]
            used = [piece.param for piece, grad in zip(home.slices, grads, strict=True) if grad is not None]
            means.append(GradShard(bucket, home.slices, grads, used))
        yield from self._written_over(self._inner.step(means, groups, 1.0))
        if not self._delay:
            self._arriving = {}

    def _slices_of(self, bucket: int) -> list[ColumnSlice]:
        return [self._slices[piece.param] for piece in self._homes[bucket].slices]

    def _written_over(self, updated: Iterator[int]) -> Iterator[int]:
        """The buckets that the inner placement has updated, with selected columns over what it has made of them."""
        try:
            for bucket in updated:
                self._write_selected(bucket)
                yield bucket
        except BaseException:  # of other buckets it may have stepped a part
            for bucket in self._homes:
                self._write_selected(bucket)
            raise

    def _write_selected(self, bucket: int) -> None:
        for column_slice in self._slices_of(bucket):
            if not column_slice.edited(0):
                column_slice.write_selected()

    def bring_in(self) -> Iterator[int]:
        # Whole buckets are gathered, so what is edited in a parameter that no step uses must be in its mirror.
        for bucket in self._buckets.values():
            for flat in bucket.params:
                flat.load()
        for shown in self._shown.values() if self.pending else ():
            shown.forget()
        yield from self._written_over(self._inner.bring_in())
        self._arriving = {}

    def ignore_writes(self) -> None:
        self._inner.ignore_writes()
        for column_slice in self._slices.values() if self.pending else ():
            column_slice.follow(0)

    def conflict(self) -> ZeroOptError | None:
        return self._inner.conflict()


def small_members(bucket: GradBucket) -> list[int]:
    """Positions of this rank's slices that are stepped whole."""
    _, flats = slices_of(bucket)
    return [at for at, flat in enumerate(flats) if not is_matrix(flat.param)]


def home_buckets(buckets: Iterable[GradBucket]) -> list[GradBucket]:
    """What of buckets the inner placement is given: the matrices, cut alike; those of which this rank has slices."""
    homes = []
    for bucket in buckets:
        kept = [at for at, flat in enumerate(bucket.params) if is_matrix(flat.param)]
        layout, params = bucket.layout, [bucket.params[at] for at in kept]
        cut: dict[str, Any] = {name: tuple(getattr(layout, name)[at] for at in kept) for name in _PER_PARAM}
        if kept:
            home = GradBucket(replace(layout, **cut), params, bucket.rank, torch.float32, streams=bucket.streams)
            home.device = bucket.device
            homes += [home] if home.slices else []
    return homes
