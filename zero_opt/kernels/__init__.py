"""The native Adam kernel as typed functions, and ``CPUAdam`` and ``CPUAdamW`` on top of it.

``cpu_adam`` holds the classes, ``functions`` the functions, ``runs`` turns tensors into what the kernel takes,
``slots`` keeps that from step to step, ``adam_state`` converts between stored and plain state, ``threads`` counts
threads, ``checks`` decides what an address may be taken of.
"""

from __future__ import annotations

from ..system.extension import native_available, require_native
from .checks import native_isas
from .cpu_adam import CPUAdam, CPUAdamW
from .functions import AdamHypers, AdamUpdate, GradSquares, adam_update_, copy_, grad_squares, sum_count

__all__ = [
    "AdamHypers",
    "AdamUpdate",
    "CPUAdam",
    "CPUAdamW",
    "GradSquares",
    "adam_update_",
    "copy_",
    "grad_squares",
    "native_available",
    "native_isas",
    "require_native",
    "sum_count",
]
