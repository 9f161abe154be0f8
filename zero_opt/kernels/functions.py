"""The kernels as functions: one step of any number of tensors, and the norm of any number of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError, ConfigTypeError
from ..system.extension import native
from .adam_state import MAXIMUM, MOMENTS, ROLES, SQUARES
from .checks import (
    DTYPE_NAMES,
    GRAD_DTYPES,
    check_apart,
    check_tensor,
    has_memory,
    has_order,
    require_number,
    require_numbers,
    storage_order,
)
from .runs import BoundRun, check_arrays, step_runs
from .threads import checked_threads
from .updates import NativeUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamHypers:
    """The hyperparameters of one group for one step, as in ``torch.optim.Adam``.

    Attributes:
        decoupled: AdamW's weight decay; otherwise weight_decay times the param is added to the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False

    def for_mean_of(self, gradients: int) -> AdamHypers:
        """Return those of one step by the mean of so many steps' gradients, k: a step with a batch k times as large.

        lr √k, beta1^k, beta2^k and eps / √k, by the square root scaling rule (Malladi et al. 2022); decoupled weight
        decay times √k, so that it takes k lr weight_decay. With k = 1 all is as it was.
        """
        root = math.sqrt(gradients)
        return replace(
            self,
            lr=self.lr * root,
            beta1=self.beta1**gradients,
            beta2=self.beta2**gradients,
            eps=self.eps / root,
            weight_decay=self.weight_decay * root if self.decoupled else self.weight_decay,
        )

    def for_kernel(self, grad_scale: float = 1.0, *, prediction: float = 0.0) -> native.Hypers:
        """Return them as the kernel takes them.

        Args:
            prediction: how many times the copy of the param in ``out`` has the update too that the next step would make
                with the same gradient.
        """
        own = {name: getattr(self, name) for name in self.__slots__}
        return native.Hypers("adam", **own, grad_scale=grad_scale, prediction=prediction)


_NUMBERS = ("lr", "eps", "weight_decay")


def adam_hypers(group: Mapping[str, Any]) -> AdamHypers:
    """Return the hyperparameters of a param group of torch's Adam or AdamW.

    Raises:
        ConfigError, ConfigTypeError: names one that is no number.
    """
    require_numbers("betas", group["betas"], 2)
    for key in _NUMBERS:
        require_number(key, group[key])
    beta1, beta2 = group["betas"]
    return AdamHypers(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
    )


class _Adam(NativeUpdate):
    """Adam and AdamW."""

    name = "adam"
    arrays = (*MOMENTS, MAXIMUM)
    squares = SQUARES
    switches: ClassVar[Mapping[str, str]] = {MAXIMUM: "amsgrad"}
    compact = True

    def hypers(self, group: Mapping[str, Any]) -> AdamHypers:
        return adam_hypers(group)

    def roles(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.arrays if group["amsgrad"] else MOMENTS


ADAM = _Adam()


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamUpdate:
    """One tensor's step: dense CPU tensors of one shape and any non-overlapping strides.

    Attributes:
        name: what error messages call it.
        step: the step number t of this update, counted from 1.
        param: the fp32 master; or bf16, if there is a ``remainder``.
        grad: fp32, bf16 or fp16, whatever the param is.
        exp_avg, exp_avg_sq: both fp32, both bf16, or both uint8: the 8-bit format, which needs the bases.
        max_exp_avg_sq: fp32, given for amsgrad.
        remainder: int16, given for a split master: master bits = (param bits << 16) + remainder.
        exp_avg_base, exp_avg_sq_base: int16, one number for every 64 elements in storage order.
        out: fp32, bf16 or fp16: where the new param is written too, rounded to nearest with ties to even.
    """

    name: str
    hypers: AdamHypers
    step: float
    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    remainder: Tensor | None = None
    exp_avg_base: Tensor | None = None
    exp_avg_sq_base: Tensor | None = None
    out: Tensor | None = None

    def arrays(self) -> dict[str, Tensor]:
        """Return the tensors that are written, by role."""
        return {role: tensor for role in _WRITTEN if (tensor := getattr(self, role)) is not None}


_SUM_NUMEL = 4096  # kSumNumel of native/kernels/kernels.hpp
_WRITTEN = ("param", *ROLES, "out")


@torch.no_grad()
def adam_update_(
    updates: Iterable[AdamUpdate],
    *,
    grad_scale: float = 1.0,
    threads: int | None = None,
    flush_denormals: bool = False,
    isa: str = "",
) -> int:
    """Apply one Adam or AdamW step to every update, in place, in one native call and one pass over memory.

    Kingma and Ba 2015, algorithm 1; decoupled decay as in Loshchilov and Hutter 2019, algorithm 2; amsgrad as in
    Reddi et al. 2018, algorithm 2. In fp32 the bits are those of torch's fused CPU kernel; they do not depend on
    threads, instruction set or on how tensors are cut (8-bit moments: at multiples of 64). Tensors that do not share
    the param's storage order, and params that are not dense, go through a copy.

    Args:
        updates: all tensors but ``grad`` are written.
        grad_scale: what gradients are multiplied by first: one over the loss scale, times the clip coefficient.
        threads: the most that step, as for :class:`CPUAdam`. Never more than the CPUs of this process.
        flush_denormals: take subnormal numbers as zero, on the threads that work and while they do.
        isa: an instruction set out of ``native_isas().compiled`` instead of the one chosen for this processor.

    Returns:
        How many gradient elements, after scaling, were infinite or NaN.

    Raises:
        UnsupportedParam, ConfigTypeError, ConfigError: a tensor that the kernel cannot work on, by name; nothing has
            been written.
        NativeUnavailable: there is no native extension here.
    """
    updates = list(updates)
    for update in updates:
        _check_update(update)
    check_apart([(f"param of {update.name}", update.param) for update in updates])
    count = checked_threads(threads)
    batches: dict[int, tuple[native.Hypers, list[BoundRun]]] = {}
    for update in updates:
        run = BoundRun(update.arrays(), update.grad.dtype, step=update.step)
        run.set_grad(update.grad)
        if id(update.hypers) not in batches:
            batches[id(update.hypers)] = (update.hypers.for_kernel(grad_scale), [])
        batches[id(update.hypers)][1].append(run)
    return step_runs(batches.values(), threads=count, flush_denormals=flush_denormals, isa=isa)


def _check_update(update: AdamUpdate) -> None:
    if not isinstance(update, AdamUpdate):
        raise ConfigTypeError(f"updates must be AdamUpdates, got {type(update).__name__}")
    if not isinstance(update.hypers, AdamHypers):
        raise ConfigTypeError(f"hypers of {update.name} must be AdamHypers, got {type(update.hypers).__name__}")
    if not isinstance(update.step, (int, float)):
        raise ConfigTypeError(f"step of {update.name} must be a number, got {update.step!r}")
    if not update.step >= 1:
        raise ConfigError(f"step of {update.name} counts from 1, got {update.step!r}")
    check_arrays(update.name, update.arrays(), MOMENTS)
    check_tensor(f"grad of {update.name}", update.grad, update.param.shape, GRAD_DTYPES)


def sum_count(numel: int) -> int:
    """Return how many sums :func:`grad_squares` makes of so many elements, to add them up."""
    return -(-numel // _SUM_NUMEL)


def copy_(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    squares: Sequence[Tensor | None] = (),
    *,
    threads: int | None = None,
) -> None:
    """Copy tensors in one native call, large ones past the caches, and raise the targets' version counters.

    Args:
        targets, sources: contiguous CPU tensors, in pairs of one dtype and as many elements; no two targets overlap.
        squares: nothing, or, of gradients, per pair ``None`` or a place for the sums that :func:`grad_squares` takes.
        threads: as for :func:`adam_update_`.

    Raises:
        ConfigError: tensors that are not such. NativeUnavailable: no native extension here.
    """
    runs = []
    for target, source in zip(targets, sources, strict=True):
        plain = all(tensor.is_cpu and tensor.is_contiguous() and has_memory(tensor) for tensor in (target, source))
        if not plain or target.dtype is not source.dtype or target.numel() != source.numel():
            raise ConfigError("copies are of contiguous CPU tensors, in pairs of one dtype and as many elements")
        runs.append((target.data_ptr(), source.data_ptr(), target.numel() * target.element_size()))
    places = [
        (0, "float32") if sums is None else (sums.data_ptr(), DTYPE_NAMES[target.dtype])
        for sums, target in zip(squares, targets, strict=bool(squares))
    ]
    count = checked_threads(threads)
    native.copy_runs(runs, places, threads=count)
    torch.autograd.graph.increment_version([target for target in targets if not target.is_inference()])


@dataclass(frozen=True, slots=True)
class GradSquares:
    """The result of one pass over gradients.

    Attributes:
        total: the sum of the squares of all elements; infinite or NaN if any element is.
        nonfinite: how many elements are infinite or NaN.
    """

    total: float
    nonfinite: int


@torch.no_grad()
def grad_squares(
    grads: Iterable[Tensor],
    known: Sequence[Tensor | None] = (),
    *,
    threads: int | None = None,
    isa: str = "",
) -> GradSquares:
    """Return the sum of squares of all gradients, and count the non-finite elements, in one pass over memory.

    Accumulated in fp64, every 4096 elements of a tensor in 32 lanes and those sums pairwise: the bits depend on
    neither threads nor instruction set.

    Args:
        grads: dense fp32, bf16 or fp16 CPU tensors.
        known: nothing, or per gradient ``None`` or its sums, fp64, one per 4096 elements in storage order, which need
            not be found again then.
        threads: as for :func:`adam_update_`.
        isa: as for :func:`adam_update_`.

    Raises:
        UnsupportedParam, ConfigError: a gradient that the kernel cannot read. NativeUnavailable: no native extension.
    """
    grads = list(grads)
    for number, grad in enumerate(grads):
        check_tensor(f"gradient {number}", grad, None, GRAD_DTYPES)
    for number, sums in enumerate(known):
        if sums is not None:
            shape = torch.Size([sum_count(grads[number].numel())])
            check_tensor(f"the sums of gradient {number}", sums, shape, (torch.float64,))
    readable = [grad if has_order(grad, storage_order(grad)) else grad.clone() for grad in grads]
    arrays = [(grad.data_ptr(), DTYPE_NAMES[grad.dtype], grad.numel()) for grad in readable]
    count = checked_threads(threads)
    squares = [0 if sums is None else sums.data_ptr() for sums in known]
    return GradSquares(*native.grad_sum(arrays, squares, threads=count, isa=isa))
