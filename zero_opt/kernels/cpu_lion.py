"""``CPULion``: Lion, which torch has not, by the native kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch

from ..errors import ConfigError
from .checks import require_number, require_numbers
from .native_optimizer import NativeOptimizer, NativeOptions, ParamsT
from .updates import NativeUpdate, PlainHypers, plain_hypers


class _Lion(NativeUpdate):
    name = "lion"
    arrays = ("exp_avg",)
    counts = False

    def hypers(self, group: Mapping[str, Any]) -> PlainHypers:
        require_numbers("betas", group["betas"], 2)
        beta1, beta2 = group["betas"]
        return plain_hypers(self.name, group, ("lr", "weight_decay"), beta1=beta1, beta2=beta2)


LION = _Lion()


class CPULion(NativeOptimizer):
    """Lion for CPU params, stepped by the native kernel: the sign of a moment, with decoupled weight decay.

    Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2. In fp32 the bits are those of this
    loop, g the gradient (negated to ``maximize``)::

        param.mul_(1 - lr * weight_decay)
        param.add_((exp_avg * beta1 + g * (1 - beta1)).sign(), alpha=-lr)
        exp_avg.mul_(beta2).add_(g * (1 - beta2))

    An element whose sum is 0 or NaN does not move. State: ``exp_avg`` (fp32, the param's shape and strides).

    Args:
        params: tensors, (name, tensor) pairs or group dicts; dense, on the CPU, fp32, or bf16 or fp16 with a master.
        lr: learning rate, a third to a tenth of AdamW's; a 1-element tensor may be used too.
        betas: weights of the moment in the sum whose sign is taken, and in the next moment; each in [0, 1).
        weight_decay: decoupled decay per unit of lr, three to ten times AdamW's.
        maximize: ascend.
        **options: ``state=AdamState(master="float32")`` for bf16 and fp16 params, ``threads``, ``flush_denormals`` (see
            :class:`NativeOptions`), and torch's other options. ``fused`` may be None or True.

    Raises:
        UnsupportedParam, ConfigError, ConfigTypeError: a param that the kernel cannot update, or an option; a compact
            form of state, which Adam alone has.
        TypeError, ValueError: a hyperparameter that torch refuses too.
        NativeUnavailable: the extension was not built.
    """

    update = LION

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[NativeOptions],
    ) -> None:
        rest = self._take(options)
        require_number("lr", lr)
        require_numbers("betas", betas, 2)
        require_number("weight_decay", weight_decay)
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"lr and weight_decay must not be negative, and betas be in [0, 1): got lr={lr}, "
                f"weight_decay={weight_decay}, betas={betas}"
            )
        switches = {"fused": True, "foreach": None, **rest}
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, **switches}
        )
        self._made()
