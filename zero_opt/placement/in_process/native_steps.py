"""The native kernel in place of a class's own step: torch's fused formula, in one pass from gradient to parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...errors import StateDictError
from ...kernels.adam_state import ROLES, new_state
from ...kernels.checks import GRAD_DTYPES, check_apart, check_tensor
from ...kernels.functions import adam_hypers
from ...kernels.runs import check_arrays
from ...kernels.slots import Slot, SlotBatch
from ...kernels.threads import checked_threads
from ...system.devices import HOST
from ..adam_rules import STEPPED_KEYS, require_complete, require_fitting, say_fused
from ..interface import ParamState
from .units import SliceGrads, StatesByTensor, Unit

# Whether a param group, given its hyperparameters, is to be stepped by the kernel.
FusedRule = Callable[[Mapping[str, Any]], bool]


def asks_for_fused(group: Mapping[str, Any]) -> bool:
    """On the parameters' device: the group asks for it."""
    return bool(group["fused"])


def allows_fused(group: Mapping[str, Any]) -> bool:
    """Offloaded: the group does not ask for anything else."""
    if group["fused"] is None and not group["foreach"]:
        say_fused("CPUOffload", "Adam and AdamW", "; fused=False keeps those")
    return group["fused"] is not False and not group["foreach"]


class NativeSteps:
    """Steps units of Adam and AdamW. What it keeps of a parameter is the class's own state of it.

    Args:
        defaults: the class's arguments. rule: which param groups it steps.
        threads: how many step; ``None`` is the default.
    """

    def __init__(self, defaults: Mapping[str, Any], rule: FusedRule, threads: int | None) -> None:
        self.rule, self._threads = rule, threads
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

    def adopt(self, unit: Unit, position: int, state: ParamState, *, amsgrad: bool) -> None:
        """Bring values that the user has put into a state to host memory, as fp32 where the kernel wants that.

        The master is left alone.

        Raises:
            StateDictError: the kernel cannot step the state.
        """
        known = {key: state[key] for key in STEPPED_KEYS if key in state}
        require_fitting(unit.flats[position], unit.stepped[position].shape, known, amsgrad=amsgrad)
        for role in ROLES:
            value = state.get(role)
            if isinstance(value, Tensor):
                state[role] = value.to(HOST, torch.float32 if value.is_floating_point() else value.dtype)
        _require_steppable(unit, position, state)

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
        grads = [(position, grad if grad.dtype in GRAD_DTYPES else grad.to(torch.float32)) for position, grad in grads]
        with unit.own_writes([position for position, _ in grads]):
            segments = unit.by_group([position for position, _ in grads])
            batches, stop = list[tuple[Any, slice]](), 0
            for number, positions in segments:
                for gradients, alike in groupby(positions, unit.gradients.__getitem__):
                    start, stop = stop, stop + len(list(alike))
                    hypers = adam_hypers(groups[number]).for_mean_of(gradients).for_kernel(grad_scale)
                    batches.append((hypers, slice(start, stop)))
            amsgrad = [groups[number]["amsgrad"] for number, positions in segments for _ in positions]
            slots = self._batch(unit, grads, amsgrad, states)
            slots.step([grad for _, grad in grads], batches, threads=threads, flush_denormals=self._flush)

    def _batch(self, unit: Unit, grads: SliceGrads, amsgrad: list[bool], states: StatesByTensor) -> SlotBatch:
        """The kept runs of slices, which fit their gradients; ``amsgrad``: of each."""
        positions, tensors = [position for position, _ in grads], [grad for _, grad in grads]
        params = [*map(unit.target, positions)]
        states_now = [states[unit.stepped[position]] for position in positions]
        batch = self._batches.get(unit)
        holds = batch is not None and batch.holds(params, states_now, amsgrad=amsgrad)
        if batch is not None and holds and (batch.knows(tensors) or batch.takes(tensors)):
            return batch
        slots = [
            self._slot(unit, position, grad, states, amsgrad=maximum)
            for (position, grad), maximum in zip(grads, amsgrad, strict=True)
        ]
        batch = self._batches[unit] = SlotBatch(slots, params, states_now)
        return batch

    def _slot(self, unit: Unit, position: int, grad: Tensor, states: StatesByTensor, *, amsgrad: bool) -> Slot:
        """The kept run of a slice, for a gradient like this."""
        index, target = unit.pieces[position].param, unit.target(position)
        state, slot = states[unit.stepped[position]], self._slots.get(index)
        if slot is None or not (grad.is_contiguous() and slot.holds(state, target, grad, amsgrad)):
            label = unit.flats[position].label
            check_tensor(f"the gradient of {label}", grad, target.shape, GRAD_DTYPES)
            if slot is None:
                self._require_apart(unit)
            if not state:
                made = new_state(unit.stepped[position], unit.form, amsgrad=amsgrad)
                unit.complete(position, made)
                state.update(made)
            require_complete(label, state, amsgrad=amsgrad)
            try:
                slot = self._slots[index] = Slot(label, state, target, grad, amsgrad=amsgrad)
            except (TypeError, ValueError):
                _require_steppable(unit, position, state)
                raise
        return slot

    def _require_apart(self, unit: Unit) -> None:
        """Of a unit that has not been stepped yet, see that its threads will not write to the same memory."""
        if not any(piece.param in self._slots for piece in unit.pieces):
            check_apart([(flat.label, tensor) for flat, tensor in zip(unit.flats, unit.stepped, strict=True)])


def _require_steppable(unit: Unit, position: int, state: ParamState) -> None:
    """Raise StateDictError unless the kernel can step a slice with this state."""
    arrays = {role: state[role] for role in ROLES if role in state}
    try:
        check_arrays(unit.flats[position].label, {"param": unit.stepped[position], **arrays})
    except (TypeError, ValueError) as error:
        raise StateDictError(f"opt.state was edited into what cannot be stepped: {error}") from error
