"""The estimate beside what CUDA's allocator holds: NCCL at world size 1, two gloo ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_opt
from test.support.harness import run_processes

SHAPES = ((1000, 500), (333,), (700, 700))
MASTERS = zero_opt.MixedPrecision(torch.float32)


def measured(rank: int, world_size: int, offload: Any, precision: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that lie on the device between two steps, and the estimate for them."""
    torch.cuda.init()
    options = {"offload": offload, "precision": precision, "fused": True}
    meta = [torch.empty(shape, dtype=dtype, device="meta").requires_grad_() for shape in SHAPES]
    told = zero_opt.estimate(meta, world_size, device="cuda", **options).on_rank(rank)
    before = torch.cuda.memory_allocated()
    params = [nn.Parameter(torch.ones(shape, dtype=dtype, device="cuda")) for shape in SHAPES]
    opt = zero_opt.ShardedOptimizer(params, torch.optim.AdamW, **options)
    for _ in range(2):
        torch.stack([param.sum() for param in params]).sum().backward()
        opt.step()
        opt.zero_grad()
    torch.cuda.synchronize()
    gc.collect()
    found = torch.cuda.memory_allocated() - before
    opt.close()
    return found, told.device_bytes - told.nbytes("grads") - told.nbytes("communicator")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", ["device", "masters", "cpu", "half", "worker", "nvme"])
@pytest.mark.parametrize(("world_size", "backend"), [(1, "nccl"), (2, "gloo")])
def test_within_three_percent(world_size: int, backend: str, tier: str, dtype: torch.dtype, tmp_path: Path) -> None:
    offloads: dict[str, Any] = {
        "cpu": zero_opt.CPUOffload(),
        "half": zero_opt.CPUOffload(ratio=0.5),
        "worker": zero_opt.WorkerOffload(threads=1),
        "nvme": zero_opt.NVMeOffload(tmp_path),
    }
    precision = MASTERS if tier == "masters" else zero_opt.MixedPrecision()
    for found, told in run_processes(world_size, measured, offloads.get(tier), precision, dtype, backend=backend):
        assert abs(found - told) <= 0.03 * told
