"""The native updates as typed functions, and optimizers on top of them: ``CPUAdam``, ``CPUAdamW``, ``CPUSGD`` and more.

``native_optimizer`` holds what the classes have in common, a file for each update (``cpu_adam``, ``cpu_adagrad``,
``cpu_lion``, ``cpu_sgd``) the rest of them, ``table`` lists them, ``updates`` says what one is, ``functions`` holds the
functions, ``runs`` turns tensors into what the kernel takes, ``slots`` keeps that from step to step, ``adam_state``
converts between stored and plain state, ``threads`` counts threads, ``checks`` decides what an address may be taken of.
"""

from __future__ import annotations

from ..system.extension import native_available, require_native
from .checks import native_isas
from .cpu_adagrad import CPUAdagrad
from .cpu_adam import CPUAdam, CPUAdamW
from .cpu_lion import CPULion
from .cpu_sgd import CPUSGD
from .functions import AdamHypers, AdamUpdate, GradSquares, adam_update_, copy_, grad_squares, sum_count

__all__ = [
    "CPUSGD",
    "AdamHypers",
    "AdamUpdate",
    "CPUAdagrad",
    "CPUAdam",
    "CPUAdamW",
    "CPULion",
    "GradSquares",
    "adam_update_",
    "copy_",
    "grad_squares",
    "native_available",
    "native_isas",
    "require_native",
    "sum_count",
]
