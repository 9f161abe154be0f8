"""Memory that gradients leave stays with the process, for those of the next backward.

glibc returns large free blocks to the system, which clears and maps their pages again when the next gradients touch
them: tens of thousands of page faults in a step, as much time as the step itself takes.
"""

from __future__ import annotations

import ctypes
import os

# mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_INT = 2**31 - 1
# As far as glibc raises it by itself, once blocks of that size are freed. Larger blocks still go back to the system.
_HEAP_BLOCK_BYTES = 32 << 20
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_kept = 0


def keep_freed(grads_nbytes: int) -> None:
    """Have glibc keep what gradients of so many bytes in host memory leave, in this process, for good.

    It keeps twice as much at the end of its heap, since other optimizers may have gradients there too. Nothing changes
    with another C library, or where the environment says what glibc is to keep.
    """
    global _kept
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if 2 * grads_nbytes <= _kept or mallopt is None or any(name in os.environ for name in _CHOSEN_BY_USER):
        return
    _kept = 2 * grads_nbytes
    mallopt(_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES)
    mallopt(_TRIM_THRESHOLD, _kept if _kept <= _LARGEST_INT else _NEVER)
