"""The one typed door to the native Adam kernel, and ``CPUAdam`` / ``CPUAdamW`` on top of it.

``optimizers`` holds the classes, ``update`` the functions, ``runs`` turns tensors into what the kernel takes, ``slots``
keeps that from step to step, ``state`` converts between live and plain state, ``threads`` counts threads, ``checks``
decides what an address may be taken of.
"""

from __future__ import annotations

from ..system.extension import native_available, require_native
from .checks import native_isas
from .optimizers import CPUAdam, CPUAdamW
from .update import AdamHypers, AdamUpdate, GradSquares, adam_update_, copy_, grad_squares, sums_of

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
    "sums_of",
]
