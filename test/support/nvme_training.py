"""Optimizers with their state in a file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_opt
from test.support.worker_training import OVERLAPPED
from zero_opt.placement.nvme import extents

WINDOW_MB = 8192 / 2**20  # a block or two per array: parameters are cut by windows


def in_file(path: Any, **options: Any) -> zero_opt.NVMeOffload:
    return zero_opt.NVMeOffload(path, **{"window_mb": WINDOW_MB, **options})


def make(params: Any, path: Any, cls: Any = torch.optim.AdamW, **options: Any) -> zero_opt.ShardedOptimizer:
    options = {"offload": in_file(path), "reduction": OVERLAPPED, "fused": True, **options}
    return zero_opt.ShardedOptimizer(params, cls, **options)


def placement_of(optimizer: zero_opt.ShardedOptimizer) -> Any:
    engine: Any = optimizer._engine
    return engine.placement


def step_copies_of_params(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have parameters stepped as those on an accelerator are, but that copies stay on the host."""
    made = extents.FileShard.__init__

    def apart(self: Any, bucket: Any, form: Any) -> None:
        made(self, bucket, form)
        self.direct = False

    monkeypatch.setattr(extents.FileShard, "__init__", apart)
