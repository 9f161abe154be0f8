"""Native runs that are kept from step to step, for as long as the tensors they were made from stay where they are."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..errors import StateDictError, StateDictTypeError
from ..system.extension import native
from ..system.placing import placing_of
from .adam_state import BESIDE, MAXIMUM, arrays_of
from .checks import check_tensor, require_count
from .runs import BoundRun, check_arrays, errors_of_state, note_written
from .strides import dtype_of, shape_of
from .updates import NativeUpdate


class Slot(BoundRun):
    """The run of one param, and what it was made from: while that is the same, so are the addresses.

    Attributes:
        roles: which of the update's arrays the step reads and writes.
        count: for an update whose state has no count of steps: the kernel's own, since its first step differs.
        held: what the run reads and writes of the state: key, tensor, and that one's address, dtype, shape and strides.
    """

    __slots__ = ("count", "held", "layout", "pointer", "roles", "shape")

    def __init__(
        self,
        name: str,
        state: dict[str, Any],
        param: Tensor,
        grad: Tensor,
        *,
        update: NativeUpdate,
        roles: tuple[str, ...],
        count: Tensor | None = None,
    ) -> None:
        arrays = arrays_of(state, param, roles)
        if MAXIMUM in roles and MAXIMUM not in arrays:
            raise StateDictError(f"{name} has no {MAXIMUM}: amsgrad cannot be switched on after the first step")
        with errors_of_state():
            check_arrays(name, arrays, roles)
            for role in () if update.compact else roles:
                check_tensor(f"{role} of {name}", arrays[role], param.shape)
            kept_step = _kept_step(name, state) if update.counts else count
        super().__init__(arrays, grad.dtype, kept_step=kept_step)
        self.roles, self.shape, self.count = roles, param.shape, count
        self.pointer, self.layout = param.data_ptr(), (param.dtype, param.stride())
        names = ("step", "master", *roles, *BESIDE) if update.counts else ("master", *roles, *BESIDE)
        keys = [key for key in names if key in state]
        kept: list[tuple[str, Tensor]] = [(key, state[key]) for key in keys]
        self.held = [
            (key, tensor, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for key, tensor in kept
        ]

    def holds(self, state: Mapping[str, Any], param: Tensor, grad: Tensor, roles: tuple[str, ...]) -> bool:
        """Return whether nothing has changed but values."""
        if not (
            self.direct
            and grad.dtype is self.grad_dtype
            and grad.shape == self.shape
            and param.shape == self.shape
            and param.data_ptr() == self.pointer
            and (param.dtype, param.stride()) == self.layout
            and self.roles == roles
        ):
            return False
        for key, tensor, pointer, dtype, shape, strides in self.held:
            if (
                state.get(key) is not tensor
                or tensor.data_ptr() != pointer
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.stride() != strides
            ):
                return False
        return True


def own_count(
    update: NativeUpdate, state: Mapping[str, Any], roles: Sequence[str], before: Slot | None, *, begins: bool
) -> Tensor | None:
    """Return the count of steps of an update that keeps none in the state: 0 until new arrays have their values.

    Args:
        before: the param's last slot, whose count goes on with the same arrays. begins: the arrays are new.
    """
    if update.counts:
        return None
    if before is not None and not begins:
        held = {key: tensor for key, tensor, *_ in before.held}
        if all(held.get(role) is state.get(role) for role in roles):
            return before.count
    return torch.tensor(0.0 if begins else 1.0, dtype=torch.float32, device="cpu")


class SlotBatch:
    """Slots that are stepped together, and what they were made from but for gradients, to be looked at in one go.

    Args:
        params, states: of each slot.
    """

    def __init__(self, slots: list[Slot], params: list[Tensor], states: list[dict[str, Any]]) -> None:
        self.slots, self._direct = slots, all(slot.direct for slot in slots)
        self._keys = [[key for key, *_ in slot.held] for slot in slots]
        self._params, self._kept = params, self._now(states)
        self._tensors = [*params, *self._kept]
        self._facts = placing_of(self._tensors)
        self._roles = [slot.roles for slot in slots]
        self._grads = [slot.grad_dtype for slot in slots], [slot.shape for slot in slots]
        self._runs = [slot.run for slot in slots]
        self._written = [tensor for slot in slots for tensor in slot.written]
        self._last: list[weakref.ReferenceType[Tensor]] = []  # gradients, if they were read where they are

    def _now(self, states: list[dict[str, Any]]) -> list[Any]:
        return [value for state, keys in zip(states, self._keys, strict=True) for value in map(state.get, keys)]

    def takes(self, grads: list[Tensor]) -> bool:
        """Return whether gradients are contiguous, and like those that the slots were made for."""
        like = list(map(dtype_of, grads)), list(map(shape_of, grads))
        return like == self._grads and all(map(Tensor.is_contiguous, grads))

    def holds(self, params: list[Tensor], states: list[dict[str, Any]], *, roles: list[tuple[str, ...]]) -> bool:
        """Return whether nothing has changed but values, and all slots can be used again; ``roles``: of each."""
        if not self._direct or roles != self._roles:
            return False
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        return same and all(map(is_, self._now(states), self._kept)) and placing_of(self._tensors) == self._facts

    def knows(self, grads: list[Tensor]) -> bool:
        """Return whether these are the gradients of the last step, which could be read where they are."""
        return len(grads) == len(self._last) and all(map(is_, [last() for last in self._last], grads))

    def step(
        self, grads: list[Tensor], batches: Sequence[tuple[Any, slice]], *, threads: int, flush_denormals: bool
    ) -> None:
        """Step all slots in one native call, by gradients that the batch knows or takes.

        Args:
            batches: hyperparameters as the kernel takes them, and the slots that have them.
        """
        read = grads
        if not self.knows(grads):
            for slot, grad in zip(self.slots, grads, strict=True):
                slot.set_grad(grad)
            read = [slot.grad for slot in self.slots if slot.grad is not None]
            self._last = list(map(weakref.ref, grads)) if all(map(is_, read, grads)) else []
        addresses = list(map(Tensor.data_ptr, read))
        calls = [(hypers, self._runs[which], addresses[which]) for hypers, which in batches]
        native.update_step(calls, threads=threads, flush_denormals=flush_denormals)
        if read is not grads:
            for slot in self.slots:
                slot.finish()
        note_written(self._written)


def _kept_step(name: str, state: dict[str, Any]) -> Tensor:
    """Return the step count as the kernel reads and writes it."""
    step = state.get("step")
    if step is None:
        raise StateDictTypeError(f"{name} has no step")
    if not (isinstance(step, Tensor) and step.dtype is torch.float32 and step.is_cpu and step.numel() == 1):
        require_count(f"step of {name}", step)
        state["step"] = step = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    check_tensor(f"step of {name}", step)
    return step
