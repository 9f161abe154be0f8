"""Important gradients first: selected columns are stepped at every step on their device, all others now and then.

The others are stepped by the placement of the offload policy, which is given the matrices as parameters of another
form (:class:`ColumnShard`) and knows nothing of selection. What is no matrix is stepped on its device too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm.groups import Group
from ...errors import StepPending, ZeroOptError
from ...kernels import adam_update_
from ...policies import AdamState, Selective
from ...reduction.interface import GradShard, used_buckets
from ...sharding.buckets import GradBucket
from ...system.devices import HOST
from ..adam_rules import COLUMN_SELECTED, COLUMN_STEPS, WAITING, WINDOW, require_fitting, say_without_masters
from ..in_process.native_steps import NativeSteps
from ..in_process.placement import DevicePlacement
from ..in_process.units import DeviceUnits
from ..interface import ParamState, Placement, StretchPlacement
from ..masters import changed_while_pending
from ..read_through import ReadThrough
from .column_shard import ColumnShard, ColumnSlice, is_matrix
from .column_state import SavedColumns, is_trusted
from .column_step import step_columns
from .schedule import Schedule, Selector, selected_count


class SelectivePlacement(Placement):
    """Columns on the device and in an inner placement.

    Nothing waits when columns are selected, since that is done by the first step of a window, and no step is pending,
    since a step begins by bringing in the one before.

    Args:
        inner: the placement of the offload policy. delay: steps after which its updates arrive.
        threads: how many of this process step; ``None`` is the default.
    """

    def __init__(
        self,
        policy: Selective,
        inner: StretchPlacement[Any],
        group: Group,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        delay: int,
        threads: int | None,
    ) -> None:
        self._policy, self._inner, self._group, self._delay = policy, inner, group, delay
        native = NativeSteps(defaults, lambda _: True, threads)
        units = DeviceUnits(AdamState(master="float32"), small_members)
        self._small = DevicePlacement(optimizer_class, defaults, units, native)
        flush_denormals = bool(defaults.get("flush_denormals", False))
        self._update = partial(adam_update_, threads=threads, flush_denormals=flush_denormals)
        self._schedule = Schedule(policy)
        # For the step to come: what is selected, and the buckets whose parameters it changes.
        self._chosen: tuple[Mapping[int, Tensor], float] | None = None
        self._updated: Sequence[int] = ()
        self._buckets: dict[int, GradBucket] = {}
        self._shards: dict[int, ColumnShard] = {}
        self._places: dict[int, tuple[ColumnShard, int]] = {}
        self._shown: dict[int, ReadThrough] = {}
        self._amsgrad: list[bool] = []
        self._submitted: dict[int, list[int]] = {}  # to the home, and not brought in: positions by bucket
        self._waiting: set[int] = set()  # buckets with gradients that wait, on whatever rank
        self._pending_buckets: set[int] = set()  # buckets that are pending, on whatever rank
        self._plan_selections()

    # -- what there is ------------------------------------------------------------------------------------------------

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        self._inner.add_group(hypers)
        self._small.add_group(hypers)
        self._amsgrad.append(bool(hypers["amsgrad"]))

    def drop_groups(self, kept: int) -> None:
        self._inner.drop_groups(kept)
        self._small.drop_groups(kept)
        del self._amsgrad[kept:]

    def add(self, buckets: Sequence[GradBucket]) -> None:
        added = {}
        for bucket in buckets:
            members = matrix_members(bucket)
            if members:
                added[bucket.layout.index] = ColumnShard(bucket, members)
        self._inner.add([shard.home for shard in added.values()])
        self._small.add(buckets)
        self._buckets.update({bucket.layout.index: bucket for bucket in buckets})
        self._plan_selections()
        self._shards.update(added)
        for shard in added.values():
            for position, piece in enumerate(shard.pieces):
                self._places[piece.param] = (shard, position)
                self._load_slice(piece.param, {})

    def drop(self, buckets: Sequence[GradBucket]) -> None:
        indices = [bucket.layout.index for bucket in buckets]
        self._inner.drop([self._shards.pop(index).home for index in indices if index in self._shards])
        self._small.drop(buckets)
        for bucket in buckets:
            self._buckets.pop(bucket.layout.index, None)
            for index in bucket.layout.params:
                self._places.pop(index, None)
                self._shown.pop(index, None)
        self._plan_selections()

    def _plan_selections(self) -> None:
        """Let columns of every matrix be selected, on whatever rank it lies."""
        matrices = {index: matrices_of(bucket) for index, bucket in self._buckets.items()}
        totals = sorted(total for of_bucket in matrices.values() for total in of_bucket.items())
        self._selector = Selector(self._policy.topk_ratio, dict(totals), self._group)
        # Those that have what is no matrix, on whatever rank.
        self._small_buckets = {
            index for index, bucket in self._buckets.items() if len(matrices[index]) < len(bucket.params)
        }

    def repoint(self, params: Sequence[int]) -> None:
        self._small.repoint(params)
        for index in params:
            if index in self._places:
                shard, position = self._places[index]
                shard.repoint(position)

    def _slices(self) -> Iterator[ColumnSlice]:
        for shard in self._shards.values():
            yield from shard.slices

    @property
    def staging_nbytes(self) -> int:
        own = sum(column_slice.waiting.nbytes for column_slice in self._slices())
        return own + self._inner.staging_nbytes + self._small.staging_nbytes

    @property
    def spare_nbytes(self) -> int:
        """Bytes of selected columns beside their places at home, and those of the inner placements."""
        own = sum(array.nbytes for column_slice in self._slices() for array in column_slice.selected_state.values())
        return own + self._inner.spare_nbytes + self._small.spare_nbytes

    def require_not_forked(self) -> None:
        self._inner.require_not_forked()

    def close(self) -> None:
        self._small.close()
        self._inner.close()

    # -- state --------------------------------------------------------------------------------------------------------

    def _home_state(self, index: int) -> ParamState:
        return dict(self._inner.state())[index]

    def _columns_of(self, index: int, home: Callable[[], ParamState]) -> SavedColumns:
        shard, position = self._places[index]
        return SavedColumns(shard, position, self._schedule, home)

    def _stepped(self) -> Iterator[int]:
        for index, (shard, position) in self._places.items():
            if shard.slices[position].stepped or shard.slices[position].gathered:
                yield index

    def state(self) -> Iterator[tuple[int, ParamState]]:
        yield from self._small.state()
        for index in self._stepped():
            if index not in self._shown:
                self._shown[index] = ReadThrough(self._columns_of(index, partial(self._home_state, index)))
            yield index, self._shown[index]

    def saved(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        yield from self._small.saved()
        homes = dict(self._inner.state())  # values may still be read, for another rank, when this one has closed
        for index in self._stepped():
            yield index, self._columns_of(index, partial(homes.__getitem__, index))

    def resident(self) -> Iterator[Tensor]:
        yield from self._small.resident()
        for column_slice in self._slices():
            yield from column_slice.selected_state.values()

    def adopt_state(self, index: int, state: ParamState | None) -> bool:
        if index not in self._places:
            return self._small.adopt_state(index, state)
        shown, (shard, position) = self._shown.get(index), self._places[index]
        if state is shown is not None and not shown.edited():
            shown.forget()
            return False
        if state is None and not shard.slices[position].stepped:
            return False
        if self.pending:
            raise StepPending(
                f"the state of {shard.flats[position].label} was changed while a step for it was pending; call "
                "opt.flush() before that"
            )
        column_slice = shard.slices[position]
        chosen, waiting, gathered = column_slice.chosen, column_slice.waiting, column_slice.gathered
        saved = {} if state is None else dict(state)
        amsgrad = self._amsgrad[shard.pieces[position].group]
        require_fitting(shard.flats[position], shard.part(position).shape, saved, amsgrad=amsgrad)
        self._load_slice(index, saved, chosen)
        if not is_trusted(saved):  # what is selected and what waits is not the user's
            column_slice.waiting, column_slice.gathered = waiting, gathered
        if state is shown is not None:
            shown.forget()
            return False
        self._shown.pop(index, None)
        return True

    def param_of(self, index: int) -> Tensor:
        if index not in self._places:
            return self._small.param_of(index)
        shard, position = self._places[index]
        return shard.part(position)

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state. Collective."""
        self._schedule = self._agreed_schedule(states)  # what comes after it may fail on one rank
        self._submitted, self._pending_buckets = {}, set()
        self._amsgrad = [bool(group["amsgrad"]) for group in groups]
        self._small.load({index: state for index, state in states.items() if index not in self._places}, groups)
        self._inner.load({}, groups)
        without = 0
        for index, (shard, position) in self._places.items():
            saved = states.get(index, {})
            self._load_slice(index, saved)
            if "master" in saved:
                shard.distrust(position)
            without += bool(saved) and shard.param_dtype is not torch.float32 and "master" not in saved
        say_without_masters(without)
        self._shown.clear()
        self._waiting = set(self._buckets) if self._schedule.in_window else set()

    def _agreed_schedule(self, states: Mapping[int, Mapping[str, Any]]) -> Schedule:
        """Where training is, of which ranks that have no part of a matrix know nothing."""
        mine = torch.zeros(5, dtype=torch.float64, device="cpu")
        for index in self._places:
            saved = states.get(index, {})
            if is_trusted(saved) and WINDOW in saved:
                mine = torch.tensor([1.0, *saved[WINDOW].tolist()[:4]], dtype=torch.float64, device="cpu")
                break
            mine[1] = max(float(mine[1]), float(saved.get("step", 0.0)))
        known = max(part.tolist() for part in self._group.all_gather(mine))
        if known[0]:
            return self._schedule.at([int(number) for number in known[1:]])
        return Schedule(self._policy, done=int(known[1]))

    def _load_slice(self, index: int, saved: Mapping[str, Any], chosen: Tensor | None = None) -> None:
        """Replace the state of a slice; an empty one makes it new. Without a master, the parameter is it.

        Args:
            chosen: the selected columns, if the state does not say so itself. Without them, none; the first ones of a
                new state, if columns are selected by now.
        """
        shard, position = self._places[index]
        column_slice, flat = shard.slices[position], shard.flats[position]
        column_slice.forget()
        column_slice.stepped = bool(saved)
        column_slice.counts.fill_(float(saved.get("step", 0.0)))
        if chosen is None:
            selecting, total = not saved and self._schedule.since_selection >= 0, column_slice.columns.total
            count = selected_count(self._policy.topk_ratio, total) if selecting else 0
            chosen = torch.arange(count, dtype=torch.int64, device="cpu")
        column_slice.choose(chosen)
        runs = {key: self._run_of(shard, position, value) for key, value in saved.items() if _is_shaped(value)}
        if is_trusted(saved):
            column_slice.counts = saved[COLUMN_STEPS].detach().to(HOST, torch.float32).reshape(-1).clone()
            column_slice.choose(saved[COLUMN_SELECTED].detach().cpu().reshape(-1).nonzero().view(-1))
            if WAITING in saved:
                column_slice.waiting = runs[WAITING].float().clone()
                column_slice.gathered = int(saved[WINDOW].reshape(-1)[4])
        flat.load()
        blank = shard.blank_state(position, amsgrad=self._amsgrad[shard.pieces[position].group])
        self._inner.adopt_state(index, blank)
        home, numel = self._home_state(index), shard.pieces[position].in_param.numel
        zeros = torch.zeros(numel, dtype=torch.float32, device="cpu")
        values = {key: runs.get(key, zeros) for key in home if key != "step"}
        if "master" in home and "master" not in runs:
            values["master"] = shard.param_run(position).cpu()
        shard.place(position, values, home)
        shard.follow(position)

    def _run_of(self, shard: ColumnShard, position: int, value: Tensor) -> Tensor:
        """A saved tensor as 1-D: of the slice, or of the whole parameter, whose part is taken."""
        value, flat, span = value.detach().cpu(), shard.flats[position], shard.pieces[position].in_param
        if value.shape != flat.shape:
            return value.reshape(-1)
        return flat.flatten(value)[slice(*span)]

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

    def updated_buckets(self, grads: Sequence[GradShard]) -> Sequence[int]:
        """The buckets whose parameters the next step changes on any rank. Collective where columns are selected."""
        self._chosen = self._selector.select(self._squares(grads)) if self._schedule.selects else None
        used = set(used_buckets(grads))
        ahead = replace(self._schedule)  # as it is when columns have been selected, which may end the window
        if self._chosen is not None:
            ahead.selected(self._chosen[1])
        if ahead.closes and not self._delay:
            used |= self._waiting
        elif ahead.since_selection < 0 or self._policy.topk_ratio == 0:
            used &= self._small_buckets
        self._updated = sorted(used | self._pending_buckets)
        return self._updated

    def _squares(self, grads: Sequence[GradShard]) -> dict[int, tuple[int, Tensor]]:
        return {
            shard.pieces[position].param: (
                shard.slices[position].columns.first,
                shard.slices[position].columns.square_sums(shard.flat_grad(position, grad)),
            )
            for shard, position, grad in self._used(grads)
        }

    def _used(self, grads: Sequence[GradShard]) -> Iterator[tuple[ColumnShard, int, Tensor]]:
        """The slices that have a gradient."""
        for grad_shard in grads:
            shard = self._shards.get(grad_shard.bucket)
            for position, member in enumerate(() if shard is None else shard.members):
                grad = grad_shard.grads[member]
                if shard is not None and grad is not None:
                    yield shard, position, grad

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        for _ in self.bring_in():
            pass
        self._rearrange()
        for _ in self._small.step(grads, groups, grad_scale):
            pass
        self._waiting |= set(used_buckets(grads))
        for shard, position, grad in self._used(grads):
            column_slice, run = shard.slices[position], shard.flat_grad(position, grad)
            # Columns are counted that are elsewhere, too: any rank can say of all how often they were stepped.
            if column_slice.chosen.numel() < column_slice.columns.total:
                column_slice.gather(run, grad_scale)
            if column_slice.selected_state:
                step_columns(column_slice, run, groups[shard.pieces[position].group], grad_scale, self._update)
                shard.write_selected(position)
            if column_slice.chosen.numel():
                column_slice.count(selected=True)
        left = deque(self._updated)
        for bucket in self._close_window(groups) if self._schedule.closes else ():
            while left and left[0] <= bucket:
                yield left.popleft()
        self._schedule.stepped()
        yield from left

    def _rearrange(self) -> None:
        """Follow what users have written to parameters, and what was selected for this step."""
        for shard in self._shards.values():
            shard.read_params()
        if self._chosen is None:
            return
        chosen, share_left = self._chosen
        homes = dict(self._inner.state())
        for index, (shard, position) in self._places.items():
            if not torch.equal(chosen[index], shard.slices[position].chosen):
                shard.select(position, chosen[index], homes[index])
        self._schedule.selected(share_left)

    def _close_window(self, groups: Sequence[MutableMapping[str, Any]]) -> Iterator[int]:
        """Let the home step what waits; yields the buckets of which it has brought that in."""
        waiting: list[GradShard] = []
        self._submitted = {}
        for bucket, shard in self._shards.items():
            positions = [at for at, column_slice in enumerate(shard.slices) if column_slice.gathered]
            for position in positions:
                column_slice = shard.slices[position]
                stretches = list(column_slice.stretches(column_slice.at_home, column_slice.gathered))
                self._inner.set_stretches(shard.pieces[position].param, stretches, column_slice.gathered)
            means = shard.means(positions) if positions else [None] * len(shard.pieces)
            waiting.append(GradShard(bucket, shard.home.slices, means, bool(positions)))
            self._submitted[bucket] = positions
        try:
            for bucket in self._inner.step(waiting, groups, 1.0):
                self._bring_in(bucket)
                yield bucket
        except BaseException:
            if self._inner.pending:  # the window is closed all the same
                self._pending_buckets, self._waiting = self._waiting, set()
                self._schedule.stepped()
            raise
        self._pending_buckets, self._waiting = (self._waiting if self._delay else set()), set()

    def _bring_in(self, bucket: int) -> None:
        """The home has stepped what it was given of a bucket."""
        shard, positions = self._shards[bucket], self._submitted.pop(bucket, [])
        for position in positions:
            shard.slices[position].count(selected=False)
        shard.write_home(positions)

    def bring_in(self) -> Iterator[int]:
        # Whole buckets are gathered, so what is edited in a parameter that no step uses must be in its mirror.
        for bucket in self._buckets.values():
            for flat in bucket.params:
                flat.load()
        for index in self._inner.bring_in():
            self._bring_in(index)
            yield index
        self._pending_buckets = set()

    def _under_way(self) -> list[tuple[ColumnShard, list[int]]]:
        """What the pending step of the home updates."""
        return [(self._shards[bucket], at) for bucket, at in self._submitted.items()] if self.pending else []

    def ignore_writes(self) -> None:
        for shard, positions in self._under_way():
            for position in positions:
                shard.follow(position)

    def conflict(self) -> ZeroOptError | None:
        own = changed_while_pending(self._under_way())
        return self._inner.conflict() or own


def matrices_of(bucket: GradBucket) -> dict[int, int]:
    """The parameters of a bucket that are stepped by columns, and how many columns each has."""
    return {
        index: flat.param.shape[-1]
        for index, flat in zip(bucket.layout.params, bucket.params, strict=True)
        if is_matrix(flat.param)
    }


def matrix_members(bucket: GradBucket) -> list[int]:
    """Positions of this rank's slices that are stepped by columns."""
    matrices = matrices_of(bucket)
    return [at for at, piece in enumerate(bucket.slices) if piece.param in matrices]


def small_members(bucket: GradBucket) -> list[int]:
    """Positions of this rank's slices that are stepped whole."""
    matrices = matrix_members(bucket)
    return [at for at in range(len(bucket.slices)) if at not in matrices]


def _is_shaped(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
