"""The native kernel in place of a class's own step: torch's fused formula, in one pass from gradient to parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...errors import StateDictError
from ...kernels.adam_state import BESIDE, new_state
from ...kernels.checks import GRAD_DTYPES, are_plain_counts, check_apart, check_tensor, require_counts
from ...kernels.runs import check_arrays
from ...kernels.slots import Slot, SlotBatch, own_count
from ...kernels.strides import dtype_of
from ...kernels.threads import checked_threads
from ...kernels.updates import NativeUpdate, given_arrays
from ...system.devices import HOST
from ..interface import ParamState
from ..native_rules import require_complete, require_fitting, say_fused
from .units import SliceGrads, StatesByTensor, Unit

# Whether a param group, given its hyperparameters, is to be stepped by the kernel.
FusedRule = Callable[[Mapping[str, Any]], bool]


def asks_for_fused(group: Mapping[str, Any]) -> bool:
    """On the parameters' device: the group asks for it."""
    return bool(group["fused"])


def allows_fused(group: Mapping[str, Any]) -> bool:
    """Offloaded: the group does not ask for anything else."""
    if group["fused"] is None and not group["foreach"]:
        say_fused("CPUOffload", "what has a native update", "; fused=False keeps those")
    return group["fused"] is not False and not group["foreach"]


class NativeSteps:
    """Steps units of a class that has a native update. What it keeps of a parameter is the class's own state of it.

    Args:
        update: the class's. defaults: its arguments. rule: which param groups it steps.
        threads: how many step; ``None`` is the default.
    """

    def __init__(self, update: NativeUpdate, defaults: Mapping[str, Any], rule: FusedRule, threads: int | None) -> None:
        self.update, self.rule, self._threads = update, rule, threads
        self._defaults = defaults
        self._flush = bool(defaults.get("flush_denormals", False))
        self._slots: dict[int, Slot] = {}
        self._adopted: dict[int, Sequence[Any]] = {}  # by parameter: the values of its state when that fitted
        self._batches: dict[Unit, SlotBatch] = {}

    def can_step(self, unit: Unit, group: Mapping[str, Any]) -> bool:
        """Whether it steps a unit of a group."""
        if not unit.stepped or not unit.stepped[0].is_cpu or not self.rule(group):
            return False
        return unit.splits or unit.stepped[0].dtype is torch.float32

    def has_adopted(self, index: int, state: ParamState) -> bool:
        """Whether a parameter's state has the values that it had when :meth:`adopt` was called last."""
        values, adopted = state.values(), self._adopted.get(index, ())
        return len(adopted) == len(values) and all(map(is_, values, adopted))

    def adopt(self, unit: Unit, position: int, state: ParamState, group: Mapping[str, Any]) -> None:
        """Bring values that the user has put into a state to host memory, as fp32 where the kernel wants that.

        The master is left alone.

        Raises:
            StateDictError: the kernel cannot step the state.
        """
        roles = self.update.roles(group)
        known = {key: state[key] for key in self.update.keys if key in state}
        require_fitting(unit.flats[position], unit.stepped[position].shape, known, self.update, roles)
        for role in (*self.update.arrays, *BESIDE):
            value = state.get(role)
            if isinstance(value, Tensor):
                state[role] = value.to(HOST, torch.float32 if value.is_floating_point() else value.dtype)
        if not self.update.begins(state, roles):
            self._require_steppable(unit, position, state, roles)

    def require_counts(
        self, units: Iterable[Unit], groups: Sequence[Mapping[str, Any]], states: StatesByTensor
    ) -> None:
        """Raise StateDictError, naming the parameter, if a state that it steps has a step count that is none."""
        if not self.update.counts:
            return
        if are_plain_counts([state["step"] for state in states.values() if state and "step" in state]):
            return
        places, counts = list[tuple[Unit, int]](), list[Any]()
        for unit in units:
            for number, positions in unit.by_group(range(len(unit.pieces))):
                if self.can_step(unit, groups[number]):
                    kept = [(at, state) for at in positions if "step" in (state := states.get(unit.stepped[at]) or {})]
                    places += ((unit, at) for at, _ in kept)
                    counts += (state["step"] for _, state in kept)
        require_counts(counts, lambda number: places[number][0].flats[places[number][1]].label)

    @property
    def threads(self) -> int:
        """How many threads step."""
        return checked_threads(self._threads)

    def note_adopted(self, index: int, state: ParamState) -> None:
        """Let :meth:`has_adopted` be true of a state until the user puts other values into it."""
        self._adopted[index] = [*state.values()]

    def step(
        self,
        unit: Unit,
        grads: SliceGrads,
        groups: Sequence[Mapping[str, Any]],
        states: StatesByTensor,
        grad_scale: float,
    ) -> None:
        """One step of slices by their gradients, in one native call.

        Args:
            groups: all param groups.
        """
        threads = checked_threads(self._threads)
        used, tensors = (list(part) for part in zip(*grads, strict=True))
        if not {*map(dtype_of, tensors)}.issubset(GRAD_DTYPES):
            tensors = [grad if grad.dtype in GRAD_DTYPES else grad.to(torch.float32) for grad in tensors]
        with unit.own_writes(used):
            segments = unit.by_group(used)
            batches, stop = list[tuple[Any, slice]](), 0
            for number, positions in segments:
                for gradients, alike in groupby(positions, unit.gradients.__getitem__):
                    start, stop = stop, stop + len(list(alike))
                    hypers = self.update.hypers(groups[number]).for_mean_of(gradients).for_kernel(grad_scale)
                    batches.append((hypers, slice(start, stop)))
            by_segment = (repeat(self.update.roles(groups[number]), len(at)) for number, at in segments)
            roles = [*chain.from_iterable(by_segment)]
            slots = self._batch(unit, used, tensors, roles, states)
            slots.step(tensors, batches, threads=threads, flush_denormals=self._flush)

    def _batch(
        self,
        unit: Unit,
        positions: list[int],
        grads: list[Tensor],
        roles: list[tuple[str, ...]],
        states: StatesByTensor,
    ) -> SlotBatch:
        """The kept runs of slices, which fit their gradients; ``roles``: of each."""
        params = unit.targets(positions)
        states_now = [states.get(unit.stepped[position], {}) for position in positions]
        batch = self._batches.get(unit)
        holds = batch is not None and batch.holds(params, states_now, roles=roles)
        if batch is not None and holds and (batch.knows(grads) or batch.takes(grads)):
            return batch
        slots = [
            self._slot(unit, position, grad, states, own)
            for position, grad, own in zip(positions, grads, roles, strict=True)
        ]
        states_now = [states.get(unit.stepped[position], {}) for position in positions]
        batch = self._batches[unit] = SlotBatch(slots, params, states_now)
        return batch

    def _slot(self, unit: Unit, position: int, grad: Tensor, states: StatesByTensor, roles: tuple[str, ...]) -> Slot:
        """The kept run of a slice, for a gradient like this."""
        index, target, stepped = unit.pieces[position].param, unit.targets([position])[0], unit.stepped[position]
        state, slot = states.get(stepped, {}), self._slots.get(index)
        if slot is not None and grad.is_contiguous() and slot.holds(state, target, grad, roles):
            return slot
        label, update = unit.flats[position].label, self.update
        check_tensor(f"the gradient of {label}", grad, target.shape, GRAD_DTYPES)
        if slot is None:
            self._require_apart(unit)
        begins = update.begins(state, roles)
        if begins:
            made = new_state(update, stepped, unit.form, roles, first=update.first_value(self._defaults))
            made = {key: value for key, value in made.items() if state.get(key) is None}
            unit.complete(position, made)
            if made:
                states.setdefault(stepped, {}).update(made)
                state = states[stepped]
        require_complete(label, state, update, roles)
        try:
            count = own_count(update, state, roles, slot, begins=begins)
            slot = Slot(label, state, target, grad, update=update, roles=roles, count=count)
        except (TypeError, ValueError):
            self._require_steppable(unit, position, state, roles)
            raise
        self._slots[index] = slot
        return slot

    def _require_apart(self, unit: Unit) -> None:
        """Of a unit that has not been stepped yet, see that its threads will not write to the same memory."""
        if not any(piece.param in self._slots for piece in unit.pieces):
            check_apart([(flat.label, tensor) for flat, tensor in zip(unit.flats, unit.stepped, strict=True)])

    def _require_steppable(self, unit: Unit, position: int, state: ParamState, roles: Sequence[str]) -> None:
        """Raise StateDictError unless the kernel can step a slice with this state."""
        arrays = given_arrays(state, (*roles, *BESIDE))
        try:
            check_arrays(unit.flats[position].label, {"param": unit.stepped[position], **arrays}, roles)
        except (TypeError, ValueError) as error:
            raise StateDictError(f"opt.state was edited into what cannot be stepped: {error}") from error
