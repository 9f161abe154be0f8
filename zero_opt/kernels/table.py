"""Which classes there is a native update for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .cpu_adagrad import ADAGRAD, CPUAdagrad
from .cpu_adam import CPUAdam, CPUAdamW
from .cpu_lion import LION, CPULion
from .cpu_sgd import CPUSGD, SGD
from .functions import ADAM
from .native_optimizer import NativeOptimizer
from .updates import NativeUpdate

UPDATES: Mapping[type[torch.optim.Optimizer], NativeUpdate] = {
    **dict.fromkeys((torch.optim.Adam, torch.optim.AdamW, CPUAdam, CPUAdamW), ADAM),
    **dict.fromkeys((torch.optim.Adagrad, CPUAdagrad), ADAGRAD),
    **dict.fromkeys((torch.optim.SGD, CPUSGD), SGD),
    CPULion: LION,
}
# This package's own, which step on the CPU alone.
NATIVE_CLASSES = tuple(cls for cls in UPDATES if issubclass(cls, NativeOptimizer))
