"""One tensor's step as the kernel takes it: checked, in one stretch of memory each, by address.

In "param" order means: element i of every array is the same element. Blocks of 8-bit moments are counted in it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, ConfigTypeError, StateDictError, StateDictTypeError, UnsupportedParam
from ..system.extension import native
from ..system.saved_tensors import copies_saved, keep_saved
from .checks import DTYPE_NAMES, FLOAT32, GRAD_DTYPES, check_reach, check_tensor, has_order, storage_order

BLOCK_NUMEL = 64  # kCutNumel of native/kernels/kernels.hpp
SPLIT_PARAM = (torch.bfloat16,)
MOMENT_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "block8": torch.uint8}
BASES = ("exp_avg_base", "exp_avg_sq_base")
INT16 = (torch.int16,)
# What has the param's shape; the bases have one number per block.
SHAPED: Mapping[str, tuple[torch.dtype, ...]] = {
    "exp_avg": (*MOMENT_DTYPE.values(),),
    "exp_avg_sq": (*MOMENT_DTYPE.values(),),
    "momentum_buffer": FLOAT32,
    "sum": FLOAT32,
    "max_exp_avg_sq": FLOAT32,
    "remainder": INT16,
    "out": GRAD_DTYPES,
}


def blocks_of(numel: int) -> int:
    """Return how many blocks of 8-bit moments so many elements have."""
    return -(-numel // BLOCK_NUMEL)


def check_arrays(name: str, arrays: Mapping[str, Tensor], needed: Sequence[str]) -> None:
    """Raise UnsupportedParam, ConfigTypeError or ConfigError unless these tensors, by role, make up one param's step.

    Args:
        name: what error messages call the param.
        arrays: by role. needed: which there must be beside "param".
    """
    for role in ("param", *needed):
        if arrays.get(role) is None:
            raise ConfigTypeError(f"{name} has no {role}")
    param = arrays["param"]
    check_tensor(f"param of {name}", param, None, SPLIT_PARAM if "remainder" in arrays else FLOAT32)
    for role, dtypes in SHAPED.items():
        if role in arrays:
            check_tensor(f"{role} of {name}", arrays[role], param.shape, dtypes)
            check_reach(f"{role} of {name}", arrays[role])
    check_reach(f"param of {name}", param)
    if "exp_avg_sq" not in arrays:
        return
    first, second = arrays["exp_avg"].dtype, arrays["exp_avg_sq"].dtype
    if first is not second:
        raise ConfigTypeError(f"exp_avg and exp_avg_sq of {name} must have one dtype, got {first} and {second}")
    if first is torch.uint8:
        for role in BASES:
            if role not in arrays:
                raise ConfigTypeError(f"{name} has no {role}")
            check_tensor(f"{role} of {name}", arrays[role], torch.Size([blocks_of(param.numel())]), INT16)
            if not has_order(arrays[role.removesuffix("_base")], storage_order(param)):
                raise ConfigError(f"8-bit moments of {name} must lie in memory as the param does")


@contextmanager
def errors_of_state() -> Iterator[None]:
    """A context for checks of an optimizer's state: their errors are StateDictErrors, and say what to do."""
    try:
        yield
    except (ConfigError, ConfigTypeError, UnsupportedParam) as error:
        kind = StateDictTypeError if isinstance(error, TypeError) else StateDictError
        raise kind(
            f"{error}. Put back what was there, load a state dict, or start afresh with opt.state.clear(); to change "
            "values, edit what state_dict() returns, and load that"
        ) from error


class BoundRun:
    """A native run bound to tensors: what must be kept, copied back and told to autograd for it.

    Attributes:
        run: holds the addresses; the gradient's goes along with each step.
        grad: what the next step is by, as :meth:`set_grad` was given it.
        direct: no array is a copy, so the run may be used again while all addresses stay.
        order: the strides that a gradient must have to be read where it is.
    """

    __slots__ = ("_staged", "_written", "direct", "grad", "grad_dtype", "order", "run")

    def __init__(
        self,
        arrays: Mapping[str, Tensor],
        grad_dtype: torch.dtype,
        *,
        step: float = 1.0,
        kept_step: Tensor | None = None,
        to: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Bind a run to ``arrays``; ``to`` is state that is written in place of theirs, each in one run of memory."""
        self.order = storage_order(arrays["param"])
        self.grad_dtype = grad_dtype
        self.grad: Tensor | None = None
        self._staged: list[tuple[Tensor, Tensor]] = []
        addresses = {}
        for role, tensor in arrays.items():
            lies_right = role in BASES or has_order(tensor, self.order)
            addresses[role] = (tensor if lies_right else self._staged_copy(tensor)).data_ptr()
        self._written = [tensor for tensor in arrays.values() if not tensor.is_inference()]
        if kept_step is not None:
            addresses["step"] = kept_step.data_ptr()
            self._written.append(kept_step)
        self.direct = not self._staged
        out = arrays.get("out")
        self.run: native.UpdateRun = native.UpdateRun(
            arrays["param"].numel(),
            addresses,
            grad_dtype=DTYPE_NAMES[grad_dtype],
            moment_dtype=DTYPE_NAMES[arrays["exp_avg"].dtype if "exp_avg" in arrays else torch.float32],
            out_dtype=DTYPE_NAMES[torch.float32 if out is None else out.dtype],
            step=step,
            to={role: tensor.data_ptr() for role, tensor in (to or {}).items()},
        )

    def _staged_copy(self, tensor: Tensor) -> Tensor:
        run = torch.empty_strided(tensor.shape, self.order, dtype=tensor.dtype, device="cpu").copy_(tensor)
        self._staged.append((tensor, run))
        return run

    def set_grad(self, grad: Tensor) -> None:
        """Keep the gradient, or a copy of it that lies in memory as the run's arrays do."""
        if not has_order(grad, self.order):
            grad = torch.empty_strided(grad.shape, self.order, dtype=grad.dtype, device="cpu").copy_(grad)
        self.grad = grad

    @property
    def written(self) -> list[Tensor]:
        """The tensors that a step writes to."""
        return self._written

    def finish(self) -> list[Tensor]:
        """Let go of the gradient, and copy results that were made in copies to where they belong.

        Returns:
            The tensors that the step has written to.
        """
        self.grad = None
        for tensor, run in self._staged:
            tensor.copy_(run)
        return self._written


# Hyperparameters as the kernel takes them, the runs that have them, and the addresses of their gradients.
RunBatch = tuple["native.Hypers", Sequence["native.UpdateRun"], Sequence[int]]


def step_runs(
    batches: Iterable[tuple[Any, Sequence[BoundRun]]], *, threads: int, flush_denormals: bool, isa: str = ""
) -> int:
    """Step every run by its gradient, in one native call, and raise the version counters of what that writes to.

    Args:
        batches: hyperparameters as the kernel takes them, and the runs that have them.

    Returns:
        How many gradient elements, after scaling, were infinite or NaN.
    """
    calls, stepped = list[RunBatch](), list[BoundRun]()
    for hypers, runs in batches:
        if runs:
            addresses = [run.grad.data_ptr() for run in runs if run.grad is not None]
            calls.append((hypers, [run.run for run in runs], addresses))
            stepped += runs
    if copies_saved():
        keep_saved([tensor for run in stepped for tensor in run.written])
    nonfinite = native.update_step(calls, threads=threads, flush_denormals=flush_denormals, isa=isa)
    note_written([tensor for run in stepped for tensor in run.finish()])
    return nonfinite


def note_written(tensors: list[Tensor]) -> None:
    """Raise the version counters of tensors that native code has written to."""
    if tensors:
        torch.autograd.graph.increment_version(tensors)
