"""The placements that step in this process: by the wrapped class itself, or by a kernel with its formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import chain, repeat
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedOptimizer
from ...kernels.adam_state import HALVES
from ...kernels.functions import ADAM
from ...reduction.interface import GradShard, used_params
from ...sharding.buckets import GradBucket
from ...sharding.flat_param import FlatParam
from ...sharding.param_groups import hypers_of, set_hypers
from ...sharding.wrapped_class import bare_step, evaluated, steps_params_apart
from ...system.garbage_collection import without_collection
from ...system.same_objects import SameObjects
from ..compact_state import require_own_master, require_squares_of
from ..interface import ParamState, SlicePlacement
from ..masters import write_copies
from ..native_rules import require_fitting, say_without_masters
from ..read_through import ReadThrough
from .native_steps import NativeSteps
from .units import DeviceUnits, SliceGrads, Unit

# Elements that an accelerator steps by one call of the class, whose gradients take 256 MiB where they are widened.
_TOGETHER_NUMEL = 64 << 20
_is_cpu = attrgetter("is_cpu")


class Work(NamedTuple):
    """A unit and its gradients, in one step.

    Attributes:
        grads: by position in the unit.
    """

    unit: Unit
    grads: SliceGrads

    @property
    def positions(self) -> list[int]:
        """Of the slices that are stepped."""
        return [position for position, _ in self.grads]


class DevicePlacement(SlicePlacement[Unit]):
    """Steps what units make of this rank's slices: the parameters in place, masters beside them, or copies elsewhere.

    Args:
        make_units: makes all units of a bucket.
        native: what steps units that the kernel may step, where there is one for the class.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        make_units: DeviceUnits,
        native: NativeSteps | None = None,
    ) -> None:
        super().__init__()
        self._class, self._defaults = optimizer_class, dict(defaults)
        self._apart = steps_params_apart(optimizer_class)
        self._make_units, self._native = make_units, native
        self._inner: torch.optim.Optimizer | None = None
        self._leaves_grads = self._apart  # the class is known not to zero gradients in its step
        self._units: dict[int, Sequence[Unit]] = {}
        self._shown: dict[int, ReadThrough] = {}  # by parameter: what users see of compact state
        self._held = SameObjects()  # the wrapped optimizer's states, when they were listed last
        self._listed: list[tuple[int, ParamState]] = []

    def add_group(self, hypers: Mapping[str, Any]) -> None:
        group = {**hypers_of(hypers), "params": []}
        if self._inner is None:
            self._inner = self._class([group], **self._defaults)
        else:
            self._inner.add_param_group(group)

    def drop_groups(self, kept: int) -> None:
        if kept:
            del self._optimizer.param_groups[kept:]
        else:
            self._inner = None

    def add(self, buckets: Sequence[GradBucket]) -> None:
        inner = self._optimizer
        made = dict(zip((bucket.layout.index for bucket in buckets), self._make_units(buckets), strict=True))
        for bucket in buckets:
            for unit in made[bucket.layout.index]:
                self._places.update({piece.param: (unit, at) for at, piece in enumerate(unit.pieces)})
                unit.read_params(range(len(unit.pieces)))
                if not self._apart:
                    unit.carry_attributes(range(len(unit.pieces)))
                for number, positions in unit.by_group(range(len(unit.pieces))):
                    group, stepped = inner.param_groups[number], [unit.stepped[position] for position in positions]
                    # Some classes (Adagrad) make state when constructed: let a fresh one make it for these.
                    made_for = self._class([{**hypers_of(group), "params": stepped}], **self._defaults)
                    inner.state.update(made_for.state)
                    group["params"].extend(stepped)
        self._units.update(made)
        self._held.forget()

    def drop(self, buckets: Sequence[GradBucket]) -> None:
        for bucket in buckets:
            for unit in self._units.pop(bucket.layout.index, ()):
                dropped = set(map(id, unit.stepped))
                for number, _ in unit.by_group(range(len(unit.pieces))):
                    group = self._optimizer.param_groups[number]
                    group["params"] = [param for param in group["params"] if id(param) not in dropped]
                for param in unit.stepped:
                    self._optimizer.state.pop(param, None)
                for piece in unit.pieces:
                    del self._places[piece.param]
                    self._shown.pop(piece.param, None)
        self._held.forget()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self._inner is not None, "add_group comes first"
        return self._inner

    @property
    def threads(self) -> int | None:
        return None if self._native is None else self._native.threads

    @property
    def spare_nbytes(self) -> int:
        return self._make_units.spare_nbytes

    @property
    def staging_nbytes(self) -> int:
        return self._make_units.staging_nbytes

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(
        self, grads: Sequence[GradShard], groups: Sequence[MutableMapping[str, Any]], grad_scale: float
    ) -> Iterator[int]:
        inner = self._optimizer
        for shown in self._shown.values():
            shown.forget()
        self._load_mirrors()
        for outer, own in zip(groups, inner.param_groups, strict=True):
            set_hypers(own, hypers_of(outer))
        self._make_units.begin()
        yield from self._step_shards(grads, grad_scale)
        for outer, own in zip(groups, inner.param_groups, strict=True):
            outer.update(hypers_of(own))  # some classes keep adapted values in their groups

    def _step_shards(self, grads: Sequence[GradShard], grad_scale: float) -> Iterator[int]:
        """Step a few buckets at a time, so that they can be on their way to the other ranks while the next are stepped.

        All are stepped at once where the class may keep state per group or per step.
        """
        for together in _portions(grads) if self._apart else [grads]:
            works = list(self._works(together))
            if self._apart and len(together) == 1:
                for work in works:
                    self._fetch_and_step(work, grad_scale)
            else:
                for work in works:
                    work.unit.fetch(work.grads)
                self._step_by_class([Work(work.unit, work.unit.grads()) for work in works], grad_scale)
            yield from used_params(together)

    def _works(self, grads: Iterable[GradShard]) -> Iterator[Work]:
        """What there is to step."""
        for shard in grads:
            for unit in self._units[shard.bucket]:
                grads_of_unit = [
                    (position, grad)
                    for position, member in enumerate(unit.members)
                    if (grad := shard.grads[member]) is not None
                ]
                if grads_of_unit:
                    used = [position for position, _ in grads_of_unit]
                    unit.read_params(used)
                    unit.settle_halfway(used, self._optimizer.state)
                    yield Work(unit, grads_of_unit)

    def _fetch_and_step(self, work: Work, grad_scale: float) -> None:
        work.unit.fetch(work.grads)
        self._step_unit(work, grad_scale)

    def _step_unit(self, work: Work, grad_scale: float) -> None:
        """Step a unit whose gradients are being fetched: by the kernel what it can step, by the class the rest."""
        unit, groups, grads = work.unit, self._optimizer.param_groups, work.unit.grads()
        numbers = {number for number, _ in unit.by_group(work.positions)}
        fused = {number for number in numbers if self._native and self._native.can_step(unit, groups[number])}
        by_kernel = grads if fused == numbers else [(at, grad) for at, grad in grads if unit.pieces[at].group in fused]
        if fused != numbers:
            if unit.compact:
                raise UnsupportedOptimizer("a param group with split masters is stepped with fused=True alone")
            rest = [(at, grad) for at, grad in grads if unit.pieces[at].group not in fused]
            self._step_by_class([Work(unit, rest)], grad_scale)
        if self._native is not None and by_kernel:
            self._native.step(unit, by_kernel, groups, self._optimizer.state, grad_scale)
            unit.send([position for position, _ in by_kernel])

    def _step_by_class(self, works: Sequence[Work], grad_scale: float) -> None:
        """Step units by gradients that have been fetched, by the wrapped class."""
        parts: list[tuple[Tensor, Tensor]] = []
        given: list[Tensor] = []
        for unit, grads in works:
            if not self._apart:
                unit.carry_attributes(position for position, _ in grads)
            for position, grad in grads:
                part, group = unit.stepped[position], self._optimizer.param_groups[unit.pieces[position].group]
                _bring_to(part, self._optimizer.state.get(part) or {}, group)
                parts.append((part, part if self._apart else part.detach()))
                given.append(grad)
        scaled = _scaled(given, [part.dtype for part, _ in parts], grad_scale)
        nonzero = [] if self._leaves_grads else [grad for grad in scaled if _has_values(grad)]
        for (part, _), grad in zip(parts, scaled, strict=True):
            part.grad = grad
        with self._make_units.class_threads(), ExitStack() as writing:
            for work in works:
                writing.enter_context(work.unit.own_writes(work.positions))
            bare_step(self._optimizer, None if self._apart else evaluated(self._class, self.loss, parts))
            left = [] if self._apart else [part.grad for part, _ in parts]
            for part, memory in parts:
                part.grad = None
                if memory is not part and part.data_ptr() != memory.data_ptr():  # the class has assigned part.data
                    part.data = memory.copy_(part)
            self._require_params_alone()
            self._require_grads_left(left, nonzero)
            written: list[FlatParam] = []
            copies: list[tuple[Tensor, Tensor]] = []
            for work in works:
                work.unit.show_masters(work.positions, self._optimizer.state)
                flats, pairs = work.unit.result_copies(work.positions)
                written += flats
                copies += pairs
            # One call: of one per bucket, the host would take longer to give them than an accelerator to make them.
            write_copies(written, copies)
            for work in works:
                work.unit.send(work.positions)

    def _require_params_alone(self) -> None:
        """Refuse a class with state that is no parameter's, which would be lost in a checkpoint."""
        if self._apart:
            return
        for key in self._optimizer.state:
            if not isinstance(key, Tensor):
                raise UnsupportedOptimizer(
                    f"{self._class.__name__} keeps state under {key!r}, which is no parameter, and cannot be sharded "
                    "over several ranks, nor with an offload or masters; use it at world size 1 without"
                )

    def _require_grads_left(self, left: Iterable[Tensor | None], nonzero: Sequence[Tensor]) -> None:
        """Refuse a class that drops or zeroes gradients in its step: ``p.grad`` would have them in the next one too.

        Args:
            left: what a class that is not torch's has left in ``p.grad``.
            nonzero: gradients that were not zero, in the first step with any.
        """
        if any(grad is None for grad in left) or any(not _has_values(grad) for grad in nonzero):
            raise UnsupportedOptimizer(
                f"{self._class.__name__} drops or zeroes p.grad in its own step(), which is not followed over several "
                "ranks, nor with an offload or masters; take that out of the class, and call opt.zero_grad() after "
                "opt.step()"
            )
        self._leaves_grads = self._leaves_grads or bool(nonzero)

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[tuple[int, ParamState]]:
        states = self._optimizer.state
        held = (*states, *states.values())
        if not self._held.are(held):
            self._listed = []
            for index, (unit, position) in self._places.items():
                state = states.get(unit.stepped[position])
                if state is not None:
                    unit.complete(position, state)
                    if unit.compact and index not in self._shown:
                        self._shown[index] = ReadThrough(unit.plain_form(position, states))
                    self._listed.append((index, self._shown[index] if unit.compact else state))
            self._held.note(held)
        yield from self._listed

    def saved(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        states = self._optimizer.state
        for index, _ in self.state():
            unit, position = self._places[index]
            yield index, unit.saved_state(position, states[unit.stepped[position]])

    def adopt_state(self, index: int, state: ParamState | None) -> bool:
        (unit, position), states = self._places[index], self._optimizer.state
        stepped = unit.stepped[position]
        if state is None:
            self._held.forget()
            self._shown.pop(index, None)
            if states.pop(stepped, None) is not None:
                unit.take_master(position, None)
            return False
        if unit.compact:
            return self._adopt_values(index, state)
        other = states.get(stepped) is not state
        native = None if self._native is None or self._native.has_adopted(index, state) else self._native
        if native is not None:
            group = self._optimizer.param_groups[unit.pieces[position].group]
            if native.can_step(unit, group):
                native.adopt(unit, position, state, group)
            else:
                native = None
        if other or state.get("master", stepped) is not stepped:
            unit.take_master(position, state)
            unit.complete(position, state)
            states[stepped] = state
        if native is not None:
            native.note_adopted(index, state)
        return False

    def _adopt_values(self, index: int, state: ParamState) -> bool:
        """As :meth:`adopt_state`, of a compact state, for values in torch's form."""
        shown, (unit, position) = self._shown.get(index), self._places[index]
        if state is shown and not shown.edited():
            shown.forget_live()
            return False
        with shown.settled() if state is shown else nullcontext():
            require_own_master(unit.flats[position].label, state, unit.form)
            group = self._optimizer.param_groups[unit.pieces[position].group]
            stepped, values = unit.stepped[position], dict(state)
            known = {key: values[key] for key in ADAM.keys if key in values}
            require_fitting(unit.flats[position], stepped.shape, known, ADAM, ADAM.roles(group))
            require_squares_of(unit.flats[position].label, known, unit.form)
            unit.take_master(position, values)
            self._optimizer.state[stepped] = unit.compact_state(position, values)
        if state is shown:
            return False
        self._shown.pop(index, None)
        self._held.forget()
        return True

    def require_counts(self) -> None:
        if self._native is not None:
            units = [unit for of_bucket in self._units.values() for unit in of_bucket]
            self._native.require_counts(units, self._optimizer.param_groups, self._optimizer.state)

    def param_of(self, index: int) -> Tensor:
        unit, position = self._places[index]
        return unit.stepped[position]

    @without_collection()
    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace all state; the wrapped class casts dtypes and fills in missing keys."""
        inner = self._optimizer
        number: dict[Tensor, int] = {}
        packed = []
        for own, hypers in zip(inner.param_groups, groups, strict=True):
            ids = [number.setdefault(part, len(number)) for part in own["params"]]
            packed.append({**hypers_of(hypers), "params": _searchable(ids) if self._apart else ids})
        local = {number[self.param_of(index)]: self._for_class(index, state) for index, state in states.items()}
        if _are_kept(self._class, list(local.values()), [self.param_of(index) for index in states]):
            # torch casts value by value, 5 us each; here there is nothing to cast.
            inner.load_state_dict({"state": {}, "param_groups": packed})
            inner.state.update(zip(map(self.param_of, states), local.values(), strict=True))
        else:
            inner.load_state_dict({"state": local, "param_groups": packed})
        self._shown.clear()
        self._held.forget()
        keeps = [index for index, (unit, _) in self._places.items() if unit.mastered or unit.compact]
        say_without_masters(sum(self._load_master(index, states.get(index, {})) for index in keeps))

    def _for_class(self, index: int, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A saved state without what the class would cast."""
        unit, _ = self._places[index]
        if unit.compact:
            return {}
        state = dict(saved)
        if unit.mastered:
            state.pop("master", None)
        return state

    def _load_master(self, index: int, saved: Mapping[str, Any]) -> bool:
        """Give a loaded state its master; whether none was saved that is needed."""
        unit, position = self._places[index]
        stepped, states = unit.stepped[position], self._optimizer.state
        unit.take_master(position, saved)
        if "master" in saved:
            unit.distrust(position)
        if saved and unit.compact:
            states[stepped] = unit.compact_state(position, saved)
        elif saved:
            unit.complete(position, states[stepped])
        mastered = unit.splits or unit.mastered
        return bool(saved) and mastered and unit.param_dtype in HALVES and "master" not in saved

    def resident(self) -> Iterator[Tensor]:
        for units in self._units.values():
            for unit in units:
                yield from unit.resident()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def close(self) -> None:
        self._make_units.close()  # state stays readable


def _portions(grads: Sequence[GradShard]) -> Iterator[Sequence[GradShard]]:
    """Cut shards into runs that are stepped together: several on an accelerator, each alone in host memory.

    The class's call for a bucket takes the host longer than it takes an accelerator to step 25 MB. Alone is, too, of
    which this rank has nothing to step.
    """
    portion, numel = list[GradShard](), 0
    for shard in grads:
        own = [grad for grad in shard.grads if grad is not None]
        alone = all(map(_is_cpu, own))
        if alone and portion:
            yield portion
            portion, numel = [], 0
        portion.append(shard)
        numel += 0 if alone else sum(map(Tensor.numel, own))
        if alone or numel >= _TOGETHER_NUMEL:
            yield portion
            portion, numel = [], 0
    if portion:
        yield portion


def _searchable(ids: list[int]) -> Sequence[int]:
    """Return the same ids; a range if they are one. torch's load_state_dict() searches them once per tensor."""
    run = range(ids[0], ids[0] + len(ids)) if ids else range(0)
    return run if ids == [*run] else ids


def _are_kept(cls: type[torch.optim.Optimizer], states: Sequence[Mapping[str, Any]], params: Sequence[Tensor]) -> bool:
    """Return whether a class of torch's would keep these tensors as they are when it loads states of parameters."""
    if (
        not cls.__module__.startswith("torch.optim.")
        or cls.load_state_dict is not torch.optim.Optimizer.load_state_dict
    ):
        return False
    if any(state["step"].dtype is not torch.float32 for state in states if isinstance(state.get("step"), Tensor)):
        return False
    values = [*chain.from_iterable(state.values() for state in states)]
    likes = [*chain.from_iterable(map(repeat, params, map(len, states)))]
    return all(map(is_, map(type, values), repeat(Tensor))) and all(
        all(map(eq, map(part, values), map(part, likes))) for part in (attrgetter("dtype"), attrgetter("device"))
    )


def _has_values(grad: Tensor) -> bool:
    """Return whether an element is not zero."""
    return bool((grad._values() if grad.is_sparse else grad).any())


def _scaled(grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], grad_scale: float) -> list[Tensor]:
    """Gradients, scaled, as the parameters they are for, of these dtypes: scaled in the wider of the two dtypes.

    Widening, and scaling what was widened, is one call for all: an accelerator is given it sooner than one for each.
    """
    fitted = _widened(grads, dtypes)
    if grad_scale != 1:
        ours = [fit for fit, grad in zip(fitted, grads, strict=True) if fit is not grad]
        if ours:
            torch._foreach_mul_(ours, grad_scale)
        # Not in place where it may be the user's own.
        fitted = [fit * grad_scale if fit is grad else fit for fit, grad in zip(fitted, grads, strict=True)]
    return [fit if fit.dtype is dtype else fit.to(dtype) for fit, dtype in zip(fitted, dtypes, strict=True)]


def _widened(grads: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Gradients as copies of these dtypes where they are wider; the others as they are."""
    widened, copies = list(grads), list[int]()
    for at, (grad, dtype) in enumerate(zip(grads, dtypes, strict=True)):
        if dtype.itemsize > grad.dtype.itemsize:
            if grad.layout is torch.strided:
                widened[at] = torch.empty_like(grad, dtype=dtype)
                copies.append(at)
            else:
                widened[at] = grad.to(dtype)
    if copies:
        torch._foreach_copy_([widened[at] for at in copies], [grads[at] for at in copies])
    return widened


def _bring_to(stepped: Tensor, state: ParamState, group: Mapping[str, Any]) -> None:
    """Bring values that the user has put into a state to the device that ``stepped`` is on.

    Numbers, such as the count of steps, stay in host memory where the class has them there.
    """
    device = stepped.get_device()  # its number, sooner compared than a torch.device
    for key, value in state.items():
        if (
            isinstance(value, Tensor)
            and value.get_device() != device
            and (value.dim() or stepped.is_cpu or group.get("capturable") or group.get("fused"))
        ):
            state[key] = value.to(stepped.device)
