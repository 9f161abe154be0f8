"""Optimizers with their state in a file."""

from __future__ import annotations

from typing import Any

import torch

import zero_opt
from test.support.worker_training import OVERLAPPED

WINDOW_MB = 8192 / 2**20  # a block or two per array: parameters are cut by windows


def in_file(path: Any, **options: Any) -> zero_opt.NVMeOffload:
    return zero_opt.NVMeOffload(path, **{"window_mb": WINDOW_MB, **options})


def make(params: Any, path: Any, **options: Any) -> zero_opt.ShardedOptimizer:
    options = {"offload": in_file(path), "reduction": OVERLAPPED, "fused": True, **options}
    return zero_opt.ShardedOptimizer(params, torch.optim.AdamW, **options)


def placement_of(optimizer: zero_opt.ShardedOptimizer) -> Any:
    engine: Any = optimizer._engine
    return engine.placement
