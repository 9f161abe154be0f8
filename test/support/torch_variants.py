"""Every class of ``torch.optim`` with every input that torch tests it with, as scripts to be run twice and compared."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as sched
from torch.testing._internal.opinfo.core import DecorateInfo


def _common_optimizers() -> Any:
    """Import torch's own tests of optimizers, which carry no types, without a description of each of torch's operators.

    These take seconds to make, and hundreds of thousands of objects, for one name that is defined elsewhere.
    """
    operators = "torch.testing._internal.common_methods_invocations"
    stand_in: Any = ModuleType(operators)
    stand_in.DecorateInfo = DecorateInfo
    present = sys.modules.setdefault(operators, stand_in)
    try:
        from torch.testing._internal import common_optimizers
    finally:
        if present is stand_in:
            del sys.modules[operators]
    return common_optimizers


_torch = _common_optimizers()
OptimizerErrorEnum = _torch.OptimizerErrorEnum
INFOS: dict[str, Any] = {info.name: info for info in _torch.optim_db}

SHAPES: tuple[tuple[int, ...], ...] = ((4, 3), (5,), (), (2, 2, 2), (130, 3))
MATRICES: tuple[tuple[int, ...], ...] = ((4, 3), (5, 2), (1, 7), (130, 3))  # Muon takes no others
OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.complex64)

Make = Callable[[Sequence[Any], dict[str, Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Variant:
    """One class with one set of arguments.

    Attributes:
        sparse: gradients are sparse. dtype: of all parameters.
    """

    name: str
    kwargs: Mapping[str, Any]
    desc: str
    sparse: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def cls(self) -> type[torch.optim.Optimizer]:
        """The class."""
        found: type[torch.optim.Optimizer] = INFOS[self.name].optim_cls
        return found

    @property
    def label(self) -> str:
        """How a failing comparison names it."""
        return f"{self.name}, {self.desc}, {self.dtype}{', sparse' if self.sparse else ''}"

    def arguments(self) -> dict[str, Any]:
        """A copy, since an lr may be a tensor that schedulers write to."""
        return copy.deepcopy(dict(self.kwargs))

    def params(self) -> list[nn.Parameter]:
        """The same parameters every time; under ``differentiable`` a step in place is for those without gradients."""
        shapes = MATRICES if self.name == "Muon" or self.sparse else SHAPES
        generator = torch.Generator().manual_seed(5)
        trainable = not self.kwargs.get("differentiable")
        return [
            nn.Parameter(
                torch.randn(shape, generator=generator, dtype=torch.complex64).real.contiguous().to(self.dtype),
                trainable,
            )
            for shape in shapes
        ]

    def grad(self, step: int, index: int, shape: torch.Size) -> Tensor:
        """Gradient of parameter ``index`` in a step."""
        dense = torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + index), dtype=torch.complex64)
        dense = dense if self.dtype.is_complex else dense.real.contiguous().to(self.dtype)
        if not self.sparse:
            return dense
        rows = torch.tensor([[0, shape[0] - 1, 0]]) if shape[0] > 1 else torch.tensor([[0]])
        values = dense[: rows.shape[1]].clone()
        return torch.sparse_coo_tensor(rows, values, shape, check_invariants=False)

    def set_grads(self, params: Sequence[Tensor], step: int) -> None:
        """Give every parameter its gradient of a step."""
        for index, param in enumerate(params):
            param.grad = self.grad(step, index, param.shape)

    def step(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], number: int) -> Any:
        """One step with the gradients of that number; returns what ``step`` does."""
        if not INFOS[self.name].step_requires_closure:
            self.set_grads(params, number)
            return optimizer.step()

        def closure() -> Tensor:
            self.set_grads(params, number)
            return sum((param.abs() ** 2).sum() for param in params)  # type: ignore[return-value]

        return optimizer.step(closure)


def variants(name: str, dtypes: Sequence[torch.dtype] = ()) -> Iterator[Variant]:
    """All variants of a class in fp32, foreach, fused and differentiable included; the plain ones in other dtypes."""
    info = INFOS[name]
    sparse = [True] if info.only_supports_sparse_grads else [False, True] if info.supports_sparse else [False]
    for found in _torch._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info):
        for is_sparse in sparse:
            yield Variant(name, found.kwargs, found.desc, is_sparse)
    for dtype in dtypes:
        for found in info.optim_inputs_func("cpu"):
            yield Variant(name, found.kwargs, found.desc, sparse[0], dtype)


def plain(variant: Variant) -> Make:
    """Makes the class itself."""
    return lambda params, kwargs: variant.cls(params, **kwargs)  # type: ignore[call-arg]


def error_inputs(name: str) -> list[Any]:
    """Torch's own list of mistakes: ``optimizer_error_input`` with params and kwargs, ``error_type``, ``error_on``."""
    found: list[Any] = INFOS[name].optim_error_inputs_func("cpu", torch.float32)
    return found


Schedule = Callable[[torch.optim.Optimizer], Any]

# By class name; what each is called with is in :func:`scheduled`.
SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda opt: sched.LambdaLR(opt, [lambda epoch: 0.9**epoch] * len(opt.param_groups)),
    "MultiplicativeLR": lambda opt: sched.MultiplicativeLR(opt, lambda epoch: 0.9 + 0.01 * epoch),
    "StepLR": lambda opt: sched.StepLR(opt, 2, gamma=0.5),
    "MultiStepLR": lambda opt: sched.MultiStepLR(opt, [1, 3, 4], gamma=0.5),
    "ConstantLR": lambda opt: sched.ConstantLR(opt, factor=0.3, total_iters=2),
    "LinearLR": lambda opt: sched.LinearLR(opt, start_factor=0.2, total_iters=4),
    "ExponentialLR": lambda opt: sched.ExponentialLR(opt, gamma=0.8),
    "SequentialLR": lambda opt: sched.SequentialLR(
        opt, [sched.ConstantLR(opt, 0.1, 2), sched.ExponentialLR(opt, 0.9)], milestones=[2]
    ),
    "CosineAnnealingLR": lambda opt: sched.CosineAnnealingLR(opt, T_max=4),
    "ChainedScheduler": lambda opt: sched.ChainedScheduler(
        [sched.ConstantLR(opt, 0.1, 2), sched.ExponentialLR(opt, 0.9)]
    ),
    "ReduceLROnPlateau": lambda opt: sched.ReduceLROnPlateau(opt, patience=1),
    "CyclicLR": lambda opt: sched.CyclicLR(opt, 0.001, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda opt: sched.CosineAnnealingWarmRestarts(opt, T_0=3),
    "OneCycleLR": lambda opt: sched.OneCycleLR(opt, max_lr=0.1, total_steps=12),
    "PolynomialLR": lambda opt: sched.PolynomialLR(opt, total_iters=4, power=2.0),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=3),
}


def scheduled(schedule: str, variant: Variant, make: Make, read: Callable[[Any], Any]) -> list[Any]:
    """Six steps under a schedule, resumed from its state dict after three; lr, momentum and what ``read`` sees of it.

    Args:
        read: the optimizer's state dict; called on every rank.
    """
    params, seen = variant.params(), []
    optimizer = make([{"params": params[:1], "lr": 0.02}, {"params": params[1:]}], variant.arguments())
    scheduler = SCHEDULES[schedule](optimizer)
    for number in range(6):
        variant.step(optimizer, params, number)
        scheduler.step(1.0) if schedule == "ReduceLROnPlateau" else scheduler.step()
        keys = ("lr", "momentum", "betas", "initial_lr", "max_lr", "max_momentum")
        seen.append(
            [{key: copy.deepcopy(group[key]) for key in keys if key in group} for group in optimizer.param_groups]
        )
        if number == 2:
            saved = scheduler.state_dict()
            scheduler = SCHEDULES[schedule](optimizer)
            scheduler.load_state_dict(saved)
    return [seen, params, scheduler.get_last_lr(), read(optimizer)]
