"""Native runs that are kept from step to step, for as long as the tensors they were made from stay where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .adam_state import ROLES, arrays_of
from .checks import check_tensor
from .runs import BoundRun, check_arrays


class Slot(BoundRun):
    """The run of one param, and what it was made from: while that is the same, so are the addresses."""

    __slots__ = ("amsgrad", "held", "layout", "pointer", "shape")

    def __init__(self, name: str, state: dict[str, Any], param: Tensor, grad: Tensor, *, amsgrad: bool) -> None:
        arrays = arrays_of(state, param)
        if not amsgrad:
            arrays.pop("max_exp_avg_sq", None)
        elif "max_exp_avg_sq" not in arrays:
            raise ValueError(f"{name} has no max_exp_avg_sq: amsgrad cannot be switched on after the first step")
        check_arrays(name, arrays)
        super().__init__(arrays, grad.dtype, kept_step=_kept_step(name, state))
        self.amsgrad, self.shape = amsgrad, param.shape
        self.pointer, self.layout = param.data_ptr(), (param.dtype, param.stride())
        keys = [key for key in ("step", "master", *ROLES) if key in state and (amsgrad or key != "max_exp_avg_sq")]
        kept: list[tuple[str, Tensor]] = [(key, state[key]) for key in keys]
        self.held = [(key, tensor, tensor.data_ptr(), tensor.dtype, tensor.stride()) for key, tensor in kept]

    def holds(self, state: dict[str, Any], param: Tensor, grad: Tensor, amsgrad: bool) -> bool:
        """Return whether nothing has changed but values."""
        if not (
            self.direct
            and grad.dtype is self.grad_dtype
            and grad.shape == self.shape
            and param.shape == self.shape
            and param.data_ptr() == self.pointer
            and (param.dtype, param.stride()) == self.layout
            and self.amsgrad == amsgrad
        ):
            return False
        for key, tensor, pointer, dtype, strides in self.held:
            if (
                state.get(key) is not tensor
                or tensor.data_ptr() != pointer
                or tensor.dtype is not dtype
                or tensor.stride() != strides
            ):
                return False
        return True


def _kept_step(name: str, state: dict[str, Any]) -> Tensor:
    """Return the step count as the kernel reads and writes it."""
    step = state.get("step")
    if step is None:
        raise TypeError(f"{name} has no step")
    if not (isinstance(step, Tensor) and step.dtype is torch.float32 and step.is_cpu and step.numel() == 1):
        state["step"] = step = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    check_tensor(f"step of {name}", step)
    return step
