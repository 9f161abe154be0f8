"""Host memory that a GPU reads and writes by itself, while the processor does something else."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

_log = logging.getLogger("zero_opt")
# The driver locks pages one call at a time, and nothing else of the process's memory changes meanwhile.
_PIECE_BYTES = 256 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: for every device


class PageLock:
    """Memory registered with CUDA, in pieces, until :meth:`release`.

    What the driver refuses stays as it is: copies are right then too, and wait.

    Args:
        address: of the first byte, at the start of a page. nbytes: whole pages.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        pieces: list[int] = []
        runtime = _runtime()
        for start in range(address, address + nbytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, address + nbytes - start)
            error = int(runtime.cudaHostRegister(start, length, _PORTABLE))
            if error:
                _log.warning("CUDA does not lock %d bytes of host memory (error %d): copies will wait", length, error)
                break
            pieces.append(start)
        self.release = weakref.finalize(self, _release, pieces)


def _release(pieces: list[int]) -> None:
    torch.cuda.synchronize()
    for start in pieces:
        _runtime().cudaHostUnregister(start)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
