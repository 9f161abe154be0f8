"""``CPUAdam`` and ``CPUAdamW``: torch's own optimizer classes with the native kernel for a step."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from .functions import ADAM
from .native_optimizer import NativeOptimizer, NativeOptions, ParamsT


class CPUAdam(NativeOptimizer, torch.optim.Adam):
    """``torch.optim.Adam(fused=True)`` for CPU params, stepped by the native kernel, to the same bits in fp32.

    Kingma and Ba 2015, algorithm 1, with L2 weight decay; ``amsgrad`` is Reddi et al. 2018, algorithm 2. State and
    ``state_dict()`` are torch's: ``step`` (fp32, 0-dim), ``exp_avg``, ``exp_avg_sq`` and, with amsgrad,
    ``max_exp_avg_sq`` (fp32, the param's shape and strides). Params of any strides are updated in place.

    Args:
        params: tensors, (name, tensor) pairs or group dicts; dense, on the CPU, fp32, or bf16 or fp16 with a master.
        lr: learning rate; a 1-element tensor may be used too.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 factor, added to the gradient.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend.
        **options: ``state=AdamState(...)``, ``threads``, ``flush_denormals`` (see :class:`NativeOptions`), and torch's
            other options. ``fused`` may be None or True; ``capturable`` changes nothing here.

    Raises:
        UnsupportedParam, ConfigError, ConfigTypeError: a param that the kernel cannot update, or an option.
        TypeError, ValueError: a hyperparameter that torch refuses too.
        NativeUnavailable: the extension was not built.
    """

    update = ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[NativeOptions],
    ) -> None:
        rest = self._take(options)
        torch.optim.Adam.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **rest)
        self._made()


class CPUAdamW(NativeOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` for CPU params, stepped by the native kernel, to the same bits in fp32.

    As CPUAdam, with the decoupled weight decay of Loshchilov and Hutter 2019, algorithm 2: every step first scales
    the params by 1 - lr * weight_decay.

    Args:
        params: tensors, (name, tensor) pairs or group dicts; dense, on the CPU, fp32, or bf16 or fp16 with a master.
        lr: learning rate; a 1-element tensor may be used too.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay per unit of lr.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend.
        **options: ``state=AdamState(...)``, ``threads``, ``flush_denormals`` (see :class:`NativeOptions`), and torch's
            other options. ``fused`` may be None or True; ``capturable`` changes nothing here.

    Raises:
        UnsupportedParam, ConfigError, ConfigTypeError: a param that the kernel cannot update, or an option.
        TypeError, ValueError: a hyperparameter that torch refuses too.
        NativeUnavailable: the extension was not built.
    """

    update = ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[NativeOptions],
    ) -> None:
        rest = self._take(options)
        torch.optim.AdamW.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **rest)
        self._made()
