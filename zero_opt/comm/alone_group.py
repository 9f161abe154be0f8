"""The group of a rank alone."""

from __future__ import annotations

import math
import os

from torch import Tensor

from .groups import ALONE, Group
from .waits_beside import Broken


class AloneGroup(Group):
    """The group of a rank alone, which needs no torch.distributed."""

    def __init__(self) -> None:
        self.inline_bytes, self.backend, self.ranks = 0, ALONE, []
        self.rank, self.world_size = 0, 1
        self.timeout_s = math.inf  # steps wait for no other rank, but for threads of this process that read the state
        self._pid, self.broken = os.getpid(), Broken()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._require_not_forked()
        return [tensor.clone()]

    def all_gather_bytes(self, payload: bytes, call: str = "", called: str = "") -> list[bytes]:  # noqa: ARG002
        self._require_not_forked()
        return [payload]

    def disconnect(self) -> None:
        """Do nothing: there is no connection to break."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Do nothing: there is no rank to send to."""

    def close(self) -> None:
        """Do nothing: there is nothing to destroy."""
