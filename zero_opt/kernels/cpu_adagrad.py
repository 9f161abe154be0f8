"""``CPUAdagrad``: torch's own class with the native kernel for a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from .native_optimizer import NativeOptimizer, NativeOptions, ParamsT
from .updates import NativeUpdate, PlainHypers, plain_hypers


class _Adagrad(NativeUpdate):
    """Its state is there before the first step."""

    name = "adagrad"
    arrays = ("sum",)
    squares = arrays
    from_start = True

    def hypers(self, group: Mapping[str, Any]) -> PlainHypers:
        return plain_hypers(self.name, group, ("lr", "lr_decay", "weight_decay", "eps"))

    def first_value(self, defaults: Mapping[str, Any]) -> float:
        return float(defaults.get("initial_accumulator_value", 0.0))


ADAGRAD = _Adagrad()


class CPUAdagrad(NativeOptimizer, torch.optim.Adagrad):
    """``torch.optim.Adagrad(fused=True)`` for CPU params, stepped by the native kernel, to the same bits in fp32.

    Duchi et al. 2011, figure 1, diagonal. State and ``state_dict()`` are torch's, and there from the start: ``step``
    (fp32, 0-dim) and ``sum`` (fp32, the param's shape and strides).

    Args:
        params: tensors, (name, tensor) pairs or group dicts; dense, on the CPU, fp32, or bf16 or fp16 with a master.
        lr: learning rate; a 1-element tensor may be used too.
        lr_decay: step t has lr / (1 + (t - 1) lr_decay).
        weight_decay: L2 factor, added to the gradient.
        initial_accumulator_value: what ``sum`` begins with.
        eps: added to the root of the sum.
        maximize: ascend.
        **options: ``state=AdamState(master="float32")`` for bf16 and fp16 params, ``threads``, ``flush_denormals`` (see
            :class:`NativeOptions`), and torch's other options. ``fused`` may be None or True.

    Raises:
        UnsupportedParam, ConfigError, ConfigTypeError: a param that the kernel cannot update, or an option; a compact
            form of state, which Adam alone has.
        TypeError, ValueError: a hyperparameter that torch refuses too.
        NativeUnavailable: the extension was not built.
    """

    update = ADAGRAD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **options: Unpack[NativeOptions],
    ) -> None:
        rest = self._take(options)
        torch.optim.Adagrad.__init__(
            self, params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize=maximize, **rest
        )
        self._made()
