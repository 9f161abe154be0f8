"""Models and optimizers for results that reach the parameters after step()."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_opt
from test.support.scenario import values
from test.support.worker_training import LATER, NOW
from zero_opt.placement.worker.results import ParamWriter
from zero_opt.sharding.late_params import Unwatched

SPECULATING = zero_opt.WorkerOffload(speculate=True)
OFFLOADS = [NOW, LATER, SPECULATING]
TINY_MB = 0.0005


def optimizer_of(model: nn.Module, late: bool, offload: Any, **options: Any) -> zero_opt.ShardedOptimizer:
    """Return an optimizer with small buckets, and with matrices and other parameters in groups of their own."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() <= 1]
    groups = [group for group in ({"params": matrices}, {"params": rest, "weight_decay": 0.0}) if group["params"]]
    options = {"reduction": zero_opt.Overlapped, "lr": 0.01, **options}
    reduction = options.pop("reduction")
    bucket = {} if reduction is zero_opt.AlreadyReduced else {"bucket_mb": TINY_MB}
    policy = reduction(overlap_param_gather=model if late else None, **bucket)
    return zero_opt.ShardedOptimizer(
        groups, torch.optim.AdamW, fused=True, reduction=policy, offload=offload, **options
    )


def slowly(patch: pytest.MonkeyPatch) -> None:
    """Delay results beside the forward, so that a read that does not wait sees the old parameter."""
    write = ParamWriter.write_beside

    def late(self: ParamWriter, made: Any) -> None:
        time.sleep(0.002)
        write(self, made)

    patch.setattr(ParamWriter, "write_beside", late)


class Layers(nn.Module):
    """One parameter in each, in a bucket of its own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 10, bias=False) for _ in range(3))
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(values(0, 0, 0, number, (10, 20)))
        self.to(dtype)

    def backward(self, step: int) -> None:
        """Gradients that no forward makes."""
        params = list(self.parameters())
        grads = [values(step, 1, 0, number, (10, 20)).to(params[0].dtype) for number in range(3)]
        with Unwatched():  # which would wait for the parameters
            torch.autograd.backward(params, grads)

    def copies(self) -> list[Tensor]:
        """What is in memory, whether or not it is late."""
        with Unwatched():
            return [param.detach().clone() for param in self.parameters()]
