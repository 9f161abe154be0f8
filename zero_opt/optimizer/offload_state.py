"""State in host memory for a while, so that a phase of generation, say, has the device's memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import StateOffloaded
from .dtensors.local_parts import local_of


class Parked:
    """Tensors that are on the CPU until they come back. The tensors stay the same objects, with the same values.

    The memory that they free goes back to torch's allocator, which serves other tensors of this process from it. The
    device has it for other processes, and for libraries with allocators of their own, after
    ``torch.accelerator.empty_cache()``.

    Attributes:
        away: between :meth:`leave` and :meth:`come_back`.
    """

    def __init__(self) -> None:
        self.away = False
        self._homes: list[tuple[Tensor, torch.device]] = []

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Re-point the data of tensors on other devices to host memory."""
        self.away = True
        for tensor in map(local_of, tensors):  # a DTensor's memory is its part's
            if not tensor.is_cpu:
                self._homes.append((tensor, tensor.device))
                tensor.data = tensor.data.cpu()

    def come_back(self) -> None:
        """Bring the tensors back to their devices."""
        while self._homes:
            tensor, device = self._homes[-1]
            tensor.data = tensor.data.to(device)
            self._homes.pop()
        self.away = False

    def require_here(self) -> None:
        """Raise StateOffloaded while the tensors are away."""
        error = self.error()
        if error is not None:
            raise error

    def error(self) -> StateOffloaded | None:
        """Return the error for a call that needs the state on its device; ``None`` if it is there."""
        if not self.away:
            return None
        return StateOffloaded(
            "the state is in host memory since offload_state(); call opt.reload_state() on every rank"
        )
