"""Important gradients first: selected columns are stepped at every step on their device, all others now and then.

The others are stepped by the placement of the offload policy, which is given the mean gradients of a window, and knows
nothing of selection: of selected columns, what it makes is overwritten. What is no matrix is one selected column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...comm.groups import Group
from ...errors import ConfigConflict, StateDictError, StepPending
from ...kernels import adam_update_
from ...kernels.adam_state import MAXIMUM
from ...kernels.functions import ADAM
from ...policies import Selective
from ...reduction.interface import GradShard, ParamsByBucket, used_params
from ...sharding.buckets import GradBucket
from ..interface import ParamState, Placement
from ..masters import slices_of
from ..native_rules import loaded_roles, new_roles, require_fitting, require_placed, say_without_masters
from ..policy import SinglePlacePolicy
from .column_slice import ColumnSlice, step_selected, write_selected
from .columns import NEVER, Schedule, check_columns, is_matrix, select_columns, square_sums, trusted_window


def _of_inner(name: str) -> Any:
    """Return a property that reads the attribute ``name`` of the inner placement."""
    return property(lambda self: getattr(self._inner, name))


class SelectivePlacement(Placement):
    """Selected columns on the device, all others in an inner placement.

    Nothing waits when columns are selected, since that is done by the first step of a window, and no step is pending,
    since a step begins by bringing in the one before.

    Args:
        home: the offload policy, which makes the inner placement.
    """

    threads, pending, lags = map(_of_inner, ("threads", "pending", "lags"))
    wait, conflict, require_writable = map(_of_inner, ("wait", "conflict", "require_writable"))
    figures, require_not_forked, close = map(_of_inner, ("figures", "require_not_forked", "close"))

    def __init__(self, policy: Selective, home: SinglePlacePolicy[Any], group: Group) -> None:
        self._policy, self._inner, self._group, self._delay = policy, home.build(group), group, home.delay
        flush_denormals = bool(home.inputs.defaults.get("flush_denormals", False))
        self._update = partial(adam_update_, threads=home.threads, flush_denormals=flush_denormals)
        self._schedule = Schedule(policy)
        self._waiting: set[int] = set()  # matrices that have gradients that wait, on whatever rank
        self._arriving: set[int] = set()  # those that the step of the last window changes, until it is brought in
        # For the step to come: whether it ends a window, what is selected, what it may change.
        self._closes = False
        self._chosen: Mapping[int, Tensor] = {}
        self._updated: set[int] = set()
        self._buckets: dict[int, GradBucket] = {}  # as the inner placement has them
        self._slices: dict[int, ColumnSlice] = {}
        self._matrices: dict[int, int] = {}  # how many columns each has, on whatever rank it lies
        self._roles: list[tuple[str, ...]] = []

    # -- what there is ------------------------------------------------------------------------------------------------

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        self._inner.add_group(hypers)
        self._roles.append(ADAM.roles(hypers))

    def lacks_room(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        return any(new_roles("Selective", ADAM, groups, self._roles))

    def make_room(self, groups: Sequence[Mapping[str, Any]]) -> None:
        added = new_roles("Selective", ADAM, groups, self._roles)
        if any(added) and self._inner.pending:
            raise ConfigConflict("amsgrad cannot be switched on while a step is pending; call opt.flush() before that")
        self._inner.make_room(groups)
        self._roles = [(*roles, *more) for roles, more in zip(self._roles, added, strict=True)]
        self._load_slices({i: {} for i, found in self._slices.items() if added[found.group] and not found.stepped})

    def drop_groups(self, kept: int) -> None:
        self._inner.drop_groups(kept)
        del self._roles[kept:]

    def add(self, buckets: Sequence[GradBucket]) -> None:
        homes = [home_bucket(bucket) for bucket in buckets]
        self._inner.add(homes)
        self._buckets.update({home.layout.index: home for home in homes})
        flats = [pair for home in homes for pair in zip(home.layout.params, home.params, strict=True)]
        self._matrices |= {index: flat.shape[-1] for index, flat in flats if is_matrix(flat.shape)}
        pieces = [pair for home in homes for pair in zip(*slices_of(home), strict=True)]
        self._slices |= {piece.param: ColumnSlice(piece, flat, self._schedule) for piece, flat in pieces}
        self._load_slices({piece.param: {} for piece, _ in pieces})

    def drop(self, buckets: Sequence[GradBucket]) -> None:
        self._inner.drop(buckets)
        for bucket in buckets:
            self._buckets.pop(bucket.layout.index, None)
            for index in bucket.layout.params:
                self._slices.pop(index, None)
                self._matrices.pop(index, None)

    def repoint(self, params: Sequence[int]) -> None:
        self._inner.repoint(params)
        for index in self._slices.keys() & {*params}:
            self._slices[index].repoint(0)

    @property
    def staging_nbytes(self) -> int:
        return self._inner.staging_nbytes + sum(found.waiting.nbytes for found in self._slices.values())

    @property
    def spare_nbytes(self) -> int:
        """Bytes of selected columns beside their places at home, and those of the inner placement."""
        return self._inner.spare_nbytes + sum(array.nbytes for array in self.resident())

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[int, ParamState]]:
        yield from ((index, found.shown) for index, found in self._slices.items() if found.stepped)

    def saved(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        yield from ((index, found) for index, found in self._slices.items() if found.stepped)

    def resident(self) -> Iterator[Tensor]:
        return (array for found in self._slices.values() for array in found.selected.values())

    def adopt_state(self, index: int, state: ParamState | None) -> bool:
        column_slice = self._slices[index]
        shown, flat, roles = column_slice.shown, column_slice.flat, self._roles[column_slice.group]
        if not (shown.edited() if state is shown else state is not None or column_slice.stepped):
            return False
        if self.pending:
            raise StepPending(
                f"the state of {flat.label} was changed while a step for it was pending; call opt.flush() before that"
            )
        if state is not shown:
            shown.forget()
        with shown.settled():
            saved = {} if state is None else dict(state)
            require_fitting(flat, column_slice.part(0).shape, saved, ADAM, roles)
            require_placed(flat.label, saved, ADAM, {*roles, *column_slice.home})
            wrong = check_columns(saved, flat.shape, column_slice.part(0).shape) if column_slice.is_matrix else None
            if wrong is not None:
                raise StateDictError(f"{flat.label}: {wrong}")
            self._load_slices({index: saved})
        return state is not shown

    def param_of(self, index: int) -> Tensor:
        return self._slices[index].part(0)

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state. Collective."""
        self._resume_schedule(states)  # what comes after it may fail on one rank
        given = {index: states.get(index, {}) for index in self._slices}
        self._roles = loaded_roles(ADAM, groups, [(self._slices[index].group, saved) for index, saved in given.items()])
        placed = zip(groups, self._roles, strict=True)
        self._inner.load({}, [{**group, "amsgrad": MAXIMUM in roles} for group, roles in placed])
        for column_slice in self._slices.values():
            column_slice.mask = self._schedule.first_columns(column_slice.flat.shape)
        self._load_slices(given)
        for column_slice in self._slices.values():
            column_slice.distrust(0)
        loaded = [(saved.keys(), self._slices[index].home.keys()) for index, saved in states.items() if saved]
        say_without_masters(sum("master" in home - given for given, home in loaded))
        self._arriving, self._waiting = set(), {*self._matrices} if self._schedule.in_window else set()

    def _resume_schedule(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on where training was, of which ranks that have no part of a matrix know nothing. Collective."""
        # Whether the position is known, and the position.
        known = [[1.0, *window[:4]] for window in map(trusted_window, states.values()) if window]
        done = max([float(states[i].get("step", 0.0)) for i in self._matrices.keys() & states.keys()], default=0.0)
        mine = max([[0.0, done, 0.0, NEVER, 0.0], *known])
        told = self._group.all_gather(torch.tensor(mine, dtype=torch.float64, device="cpu"))
        _, *position = max(part.tolist() for part in told)
        self._schedule.resume(position)

    def _load_slices(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the states of slices; an empty one makes it new."""
        for index, saved in states.items():
            found = self._slices[index]
            self._inner.adopt_state(index, found.state_at_home(saved, self._roles[found.group]))
        homes = dict(self._inner.state())
        for index, saved in states.items():
            self._slices[index].load(saved, homes[index])

    # -- steps --------------------------------------------------------------------------------------------------------

    def updated_params(self, grads: Sequence[GradShard]) -> ParamsByBucket:
        """The parameters that the next step may change on any rank. Collective where columns are selected."""
        used = {*chain(*used_params(grads).values())}
        matrices = used & self._matrices.keys()
        counts = self._schedule.done > 0 or bool(matrices)
        if counts and self._schedule.selects:
            self._select(grads)
        self._closes = counts and self._schedule.closes
        if counts:
            self._schedule.stepped()  # before anything can fail: all ranks count it
        self._waiting |= matrices
        self._updated = used | (self._arriving if self._delay else self._waiting if self._closes else set())
        return self._by_bucket(self._updated)

    def _by_bucket(self, params: set[int]) -> ParamsByBucket:
        found = {bucket: params.intersection(home.layout.params) for bucket, home in sorted(self._buckets.items())}
        return {bucket: those for bucket, those in found.items() if those}

    def _select(self, grads: Sequence[GradShard]) -> None:
        """Choose columns of every matrix, on whatever rank it lies. Collective."""
        squares = {i: torch.zeros(n, dtype=torch.float64, device="cpu") for i, n in sorted(self._matrices.items())}
        for found, run in chain(*map(self._used, grads)):
            if found.is_matrix:
                squares[found.index] = square_sums(run, found.pieces[0], found.flat)
        self._chosen, share_left = select_columns(self._policy.topk_ratio, squares, self._group)
        self._schedule.selected(share_left)

    def _used(self, shard: GradShard) -> list[tuple[ColumnSlice, Tensor]]:
        """The slices of a bucket that have a gradient, and that, 1-D."""
        used = [self._slices[piece.param] for piece in shard.slices]
        return [(s, s.flat_grad(0, grad)) for s, grad in zip(used, shard.grads, strict=True) if grad is not None]

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        list(self.bring_in())
        for index, found in self._slices.items():
            found.begin_step()
            if index in self._chosen and not torch.equal(self._chosen[index], found.mask):
                found.select(self._chosen[index])
                self._inner.repoint([index])  # masters that it does not show follow the parameter
        self._chosen = {}
        try:
            for shard in grads:
                used = self._used(shard)
                stepped = [(found, grad) for found, grad in used if found.places.numel()]
                if stepped:  # of one bucket, which are of one param group
                    step_selected(stepped, groups[stepped[0][0].group], grad_scale, self._update)
                for found, grad in used:
                    found.gather(grad, grad_scale)
            if self._closes:
                list(self._inner.step(self._take_means(), groups, 1.0))
        except BaseException:  # of any bucket a part may be stepped
            write_selected(self._slices.values())
            raise
        write_selected(self._slices_of(self._updated))
        yield from self._by_bucket(self._updated)

    def _take_means(self) -> list[GradShard]:
        """What the inner placement is to step now that a window ends."""
        means = []
        self._arriving, self._waiting = self._waiting, set()
        for bucket, home in self._buckets.items():
            slices = [self._slices[piece.param] for piece in home.slices]
            for found in slices:
                self._inner.step_by_mean_of(found.index, max(found.gathered, 1))
            grads = [found.take_mean() for found in slices]
            means.append(GradShard(bucket, home.slices, grads, self._arriving.intersection(home.layout.params)))
        return means

    def _slices_of(self, params: set[int]) -> list[ColumnSlice]:
        return [found for index, found in self._slices.items() if index in params]

    def bring_in(self) -> Iterator[int]:
        arriving = self._slices_of(self._arriving) if self.pending else []
        for found in arriving:
            found.shown.forget()
        try:
            updated = [*self._inner.bring_in()]
        finally:
            write_selected(arriving)
        self._arriving = set()
        yield from updated

    def ignore_writes(self) -> None:
        self._inner.ignore_writes()
        for column_slice in self._slices.values() if self.pending else ():
            column_slice.follow(0)


def home_bucket(bucket: GradBucket) -> GradBucket:
    """A bucket as the inner placement is given it: with gradients of its own, in fp32."""
    home = GradBucket(bucket.layout, bucket.params, bucket.rank, torch.float32, streams=bucket.streams)
    home.device = bucket.device
    return home
