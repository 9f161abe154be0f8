"""DistributedDataParallel's own averaging of gradients, which goes on once an optimizer with ``DDPHook`` is closed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def averaged(group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[Tensor]:
    """Replace one of DDP's buckets with the mean over the ranks of ``group``, by default all. Collective."""
    return allreduce_hook(group, bucket)  # type: ignore[arg-type]  # which it says cannot be None, and means by it all
