"""``CPUSGD``: torch's own class with the native kernel for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from .native_optimizer import NativeOptimizer, NativeOptions, ParamsT
from .updates import NativeUpdate, PlainHypers, plain_hypers


class _SGD(NativeUpdate):
    """Without momentum it keeps nothing."""

    name = "sgd"
    arrays = ("momentum_buffer",)
    counts = False
    switches: ClassVar[Mapping[str, str]] = {"momentum_buffer": "momentum"}

    def hypers(self, group: Mapping[str, Any]) -> PlainHypers:
        numbers = ("lr", "momentum", "dampening", "weight_decay")
        return plain_hypers(self.name, group, numbers, nesterov=bool(group["nesterov"]))

    def roles(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.arrays if group["momentum"] != 0 else ()

    def begins(self, state: Mapping[str, Any], roles: Sequence[str]) -> bool:
        return not state or any(state.get(role) is None for role in roles)

    def needed(self, roles: Sequence[str]) -> tuple[str, ...]:  # noqa: ARG002
        return ()  # a momentum that is not there, or None, is made by the next step


SGD = _SGD()


class CPUSGD(NativeOptimizer, torch.optim.SGD):
    """``torch.optim.SGD(fused=True)`` for CPU params, stepped by the native kernel, to the same bits in fp32.

    Sutskever et al. 2013 for Nesterov's momentum, in torch's form of it. State and ``state_dict()`` are torch's:
    ``momentum_buffer`` (fp32, the param's shape and strides) from the first step with momentum on, which is that step's
    gradient. As the for-loop, and unlike ``fused=True``, it takes params of one group that begin at different steps.

    Args:
        params: tensors, (name, tensor) pairs or group dicts; dense, on the CPU, fp32, or bf16 or fp16 with a master.
        lr: learning rate; a 1-element tensor may be used too.
        momentum: factor of the momentum.
        dampening: what of the gradient does not go into it.
        weight_decay: L2 factor, added to the gradient.
        nesterov: look ahead.
        maximize: ascend.
        **options: ``state=AdamState(master="float32")`` for bf16 and fp16 params, ``threads``, ``flush_denormals`` (see
            :class:`NativeOptions`), and torch's other options. ``fused`` may be None or True.

    Raises:
        UnsupportedParam, ConfigError, ConfigTypeError: a param that the kernel cannot update, or an option; a compact
            form of state, which Adam alone has.
        TypeError, ValueError: a hyperparameter that torch refuses too.
        NativeUnavailable: the extension was not built.
    """

    update = SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[NativeOptions],
    ) -> None:
        rest = self._take(options)
        torch.optim.SGD.__init__(
            self, params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, **rest
        )
        self._made()
