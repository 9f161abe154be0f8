"""Important gradients first: selected columns are stepped at every step on their device, all others now and then.

The others are stepped by the placement of the offload policy, which is given the mean gradients of a window, and knows
nothing of selection: of selected columns, what it makes is overwritten. What is no matrix is one selected column.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm.groups import Group
from ...errors import ConfigConflict, StepPending, ZeroOptError
from ...kernels import adam_update_
from ...kernels.adam_state import MAXIMUM
from ...kernels.functions import ADAM
from ...policies import Selective
from ...reduction.interface import GradShard, ParamsByBucket, merged, used_params
from ...sharding.buckets import GradBucket
from ..interface import ParamState, Placement, SlicePlacement
from ..masters import slices_of
from ..native_rules import WINDOW, loaded_roles, new_roles, require_fitting, require_placed, say_without_masters
from .column_slice import ColumnSlice, is_trusted, step_selected, write_selected
from .columns import is_matrix, square_sums
from .schedule import NEVER, Schedule, select_columns


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
        defaults: Mapping[str, Any],
        delay: int,
        threads: int | None,
    ) -> None:
        self._policy, self._inner, self._group, self._delay = policy, inner, group, delay
        flush_denormals = bool(defaults.get("flush_denormals", False))
        self._update = partial(adam_update_, threads=threads, flush_denormals=flush_denormals)
        self._schedule = Schedule(policy)
        # For the step to come: whether the schedule counts it, what is selected, what it changes.
        self._counts = False
        self._chosen: Mapping[int, Tensor] = {}
        self._updated: ParamsByBucket = {}
        self._buckets: dict[int, GradBucket] = {}  # as the inner placement has them
        self._slices: dict[int, ColumnSlice] = {}
        self._totals: dict[int, int] = {}  # columns of every matrix, on whatever rank it lies
        self._roles: list[tuple[str, ...]] = []
        self._waiting: ParamsByBucket = {}  # what has gradients that wait, on whatever rank
        self._arriving: ParamsByBucket = {}  # what is pending, on whatever rank

    # -- what there is ------------------------------------------------------------------------------------------------

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        self._inner.add_group(hypers)
        self._roles.append(ADAM.roles(hypers))

    def lacks_room(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        added = new_roles("Selective", ADAM, groups, self._roles)
        return self._inner.lacks_room(groups) or any(added)

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
        added: dict[int, ColumnSlice] = {}
        for home in homes:
            flats = zip(home.layout.params, home.params, strict=True)
            self._totals |= {index: flat.shape[-1] for index, flat in flats if is_matrix(flat.shape)}
            for piece, flat in zip(*slices_of(home), strict=True):
                added[piece.param] = ColumnSlice(piece, flat, self._schedule)
        self._slices |= added
        self._load_slices({index: {} for index in added})

    def drop(self, buckets: Sequence[GradBucket]) -> None:
        self._inner.drop(buckets)
        for bucket in buckets:
            self._buckets.pop(bucket.layout.index, None)
            for index in bucket.layout.params:
                self._slices.pop(index, None)
                self._totals.pop(index, None)

    def repoint(self, params: Sequence[int]) -> None:
        self._inner.repoint(params)
        for index in params:
            if index in self._slices:
                self._slices[index].repoint(0)

    @property
    def staging_nbytes(self) -> int:
        return self._inner.staging_nbytes + sum(found.waiting.nbytes for found in self._slices.values())

    @property
    def spare_nbytes(self) -> int:
        """Bytes of selected columns beside their places at home, and those of the inner placement."""
        return self._inner.spare_nbytes + sum(array.nbytes for array in self.resident())

    @property
    def threads(self) -> int | None:
        return self._inner.threads

    def figures(self) -> Mapping[str, float]:
        return self._inner.figures()

    def require_not_forked(self) -> None:
        self._inner.require_not_forked()

    def close(self) -> None:
        self._inner.close()

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[int, ParamState]]:
        yield from ((index, found.shown) for index, found in self._slices.items() if found.stepped)

    def saved(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        yield from ((index, found.saved) for index, found in self._slices.items() if found.stepped)

    def resident(self) -> Iterator[Tensor]:
        for column_slice in self._slices.values():
            yield from column_slice.selected.values()

    def adopt_state(self, index: int, state: ParamState | None) -> bool:
        column_slice = self._slices[index]
        shown = column_slice.shown
        changed = shown.edited() if state is shown else state is not None or column_slice.stepped
        if not changed:
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
            require_placed(column_slice.flat.label, saved, ADAM, {*roles, *column_slice.home})
            column_slice.follow_step(saved)
            column_slice.require_columns(saved)
            self._load_slices({index: saved})
        return state is not shown

    def param_of(self, index: int) -> Tensor:
        return self._slices[index].part(0)

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state. Collective."""
        self._resume_schedule(states)  # what comes after it may fail on one rank
        self._arriving = {}
        given = [(found.group, states.get(index, {})) for index, found in self._slices.items()]
        self._roles = loaded_roles(ADAM, groups, given)
        self._inner.load({}, groups)
        placed = zip(groups, self._roles, strict=True)
        self._inner.make_room([{**group, "amsgrad": MAXIMUM in roles} for group, roles in placed])
        self._load_slices({index: states.get(index, {}) for index in self._slices}, anew=True)
        for index, saved in states.items():
            if "master" in saved:
                self._slices[index].distrust(0)
        loaded = [(saved.keys(), self._slices[index].home.keys()) for index, saved in states.items() if saved]
        say_without_masters(sum("master" in home - given for given, home in loaded))
        all_params = {index: bucket.layout.params for index, bucket in self._buckets.items()}
        self._waiting = self._those(all_params, matrices=True) if self._schedule.in_window else {}

    def _resume_schedule(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Go on where training was, of which ranks that have no part of a matrix know nothing. Collective."""
        # Whether the position is known, and the position.
        known = [[1.0, *saved[WINDOW].tolist()[:4]] for saved in states.values() if is_trusted(saved)]
        steps = [float(saved.get("step", 0.0)) for index, saved in states.items() if index in self._totals]
        done = max(steps, default=0.0)
        mine = max([[0.0, done, 0.0, NEVER, 0.0], *known])
        told = self._group.all_gather(torch.tensor(mine, dtype=torch.float64, device="cpu"))
        _, *position = max(part.tolist() for part in told)
        self._schedule.resume(position)

    def _load_slices(self, states: Mapping[int, Mapping[str, Any]], *, anew: bool = False) -> None:
        """Replace the states of slices; an empty one makes it new.

        Args:
            anew: columns are selected as in new slices where the state does not say which; else they stay selected.
        """
        for index, saved in states.items():
            found = self._slices[index]
            self._inner.adopt_state(index, found.state_at_home(saved, self._roles[found.group]))
        homes = dict(self._inner.state())
        for index, saved in states.items():
            found = self._slices[index]
            chosen = self._schedule.first_columns(found.flat.shape) if anew else found.chosen
            found.load(saved, homes[index], chosen)

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
        used = used_params(grads)
        self._counts = self._schedule.done > 0 or bool(self._those(used, matrices=True))
        if self._counts and self._schedule.selects:
            self._select(grads)
        if self._schedule.closes and not self._delay:
            used = merged(used, self._waiting)
        elif self._schedule.since_selection < 0 or self._policy.topk_ratio == 0:  # matrices wait
            used = self._those(used, matrices=False)
        self._updated = dict(sorted(merged(used, self._arriving).items()))
        return self._updated

    def _those(self, params: ParamsByBucket, *, matrices: bool) -> ParamsByBucket:
        """Return the matrices among these parameters, or the others."""
        found = {index: [i for i in those if (i in self._totals) == matrices] for index, those in params.items()}
        return {index: those for index, those in found.items() if those}

    def _select(self, grads: Sequence[GradShard]) -> None:
        """Choose columns of every matrix, on whatever rank it lies. Collective."""
        squares = {
            found.index: square_sums(run, found.pieces[0], found.flat)
            for shard in grads
            for found, run in self._used(shard)
            if found.is_matrix
        }
        ratio = self._policy.topk_ratio
        self._chosen, share_left = select_columns(ratio, dict(sorted(self._totals.items())), squares, self._group)
        self._schedule.selected(share_left)

    def _used(self, shard: GradShard) -> list[tuple[ColumnSlice, Tensor]]:
        """The slices of a bucket that have a gradient, and that, 1-D."""
        used = [self._slices[piece.param] for piece in shard.slices]
        return [(s, s.flat_grad(0, grad)) for s, grad in zip(used, shard.grads, strict=True) if grad is not None]

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        closes, left = self._counts and self._schedule.closes, deque(self._updated)
        if self._counts:
            self._schedule.stepped()  # also where the step fails: the other ranks count it
        for _ in self.bring_in():
            pass
        for index, column_slice in self._slices.items():
            column_slice.begin_step()
            if index in self._chosen and not torch.equal(self._chosen[index], column_slice.chosen):
                column_slice.select(self._chosen[index])
                self._inner.repoint([index])  # masters that it does not show follow the parameter
        self._chosen = {}
        self._waiting = merged(self._waiting, self._those(used_params(grads), matrices=True))
        for bucket in self._written_over(self._stepped(grads, groups, grad_scale, closes)):
            while left and left[0] <= bucket:
                yield left.popleft()
        yield from left

    def _stepped(
        self,
        grads: Sequence[GradShard],
        groups: Sequence[MutableMapping[str, Any]],
        grad_scale: float,
        closes: bool,
    ) -> Iterator[int]:
        """Step selected columns and, if the window closes, the others; yields the buckets of which these are updated.

        What the inner placement overwrites at once is not written before.
        """
        overwritten = closes and not self._delay
        for shard in grads:
            used = self._used(shard)
            stepped = [(found, grad) for found, grad in used if found.selected]
            if stepped:  # of one bucket, which are of one param group
                step_selected(stepped, groups[stepped[0][0].group], grad_scale, self._update)
            write_selected(found for found, _ in stepped if not (overwritten and found.waits))
            for found, grad in used:
                found.gather(grad, grad_scale)
        if closes:
            yield from self._close_window(groups)

    def _close_window(self, groups: Sequence[MutableMapping[str, Any]]) -> Iterator[int]:
        """Let the inner placement step what waits; yields the buckets of which that is in the parameters."""
        self._arriving, self._waiting = self._waiting, {}
        counts = {found.gathered for found in self._slices.values()} - {0}
        count = max(counts, default=1)
        # To divide by a power of two is exact, so the step can do it to the same bits.
        divisor = count if len(counts) == 1 and count & (count - 1) == 0 else 1
        means = []
        for bucket, home in self._buckets.items():
            slices = [self._slices[piece.param] for piece in home.slices]
            for found in slices:
                self._inner.step_by_mean_of(found.index, max(found.gathered, 1))
            grads = [found.take_mean(divisor) for found in slices]
            means.append(GradShard(bucket, home.slices, grads, self._arriving.get(bucket, ())))
        yield from self._inner.step(means, groups, 1 / divisor)
        if not self._delay:
            self._arriving = {}

    def _written_over(self, updated: Iterator[int]) -> Iterator[int]:
        """The buckets that the inner placement has updated, with selected columns over what it has made of them."""
        try:
            for bucket in updated:
                write_selected(self._slices[i] for i in self._arriving.get(bucket, ()) if i in self._slices)
                yield bucket
        except BaseException:  # of other buckets it may have stepped a part
            write_selected(self._slices.values())
            raise

    def bring_in(self) -> Iterator[int]:
        for column_slice in self._slices.values() if self.pending else ():
            column_slice.shown.forget()
        yield from self._written_over(self._inner.bring_in())
        self._arriving = {}

    def ignore_writes(self) -> None:
        self._inner.ignore_writes()
        for column_slice in self._slices.values() if self.pending else ():
            column_slice.follow(0)

    def conflict(self) -> ZeroOptError | None:
        return self._inner.conflict()


def home_bucket(bucket: GradBucket) -> GradBucket:
    """A bucket as the inner placement is given it: with gradients of its own, in fp32."""
    home = GradBucket(bucket.layout, bucket.params, bucket.rank, torch.float32, streams=bucket.streams)
    home.device = bucket.device
    return home
