"""The systems under comparison, each brought to one form: forward, backward, step."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from support.model import Batch, LanguageModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_opt

HYPERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "fused": True}


@dataclass(frozen=True)
class Trainer:
    """One system, ready to train. ``step`` includes dropping the gradients; ``settle`` ends what goes on after it."""

    forward: Callable[..., Tensor]
    backward: Callable[[Tensor], object]
    step: Callable[[], object]
    settle: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class System:
    """How to build a system, and what to know about it."""

    build: Callable[[LanguageModel, Batch], Trainer]
    ours: bool = False
    trains: bool = True


def trainer(model: nn.Module, optimizer: Any) -> Trainer:
    """A model and its optimizer."""

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, torch.Tensor.backward, step, getattr(optimizer, "flush", lambda: None))


def _compute_alone(model: LanguageModel, _: Batch) -> Trainer:
    return Trainer(model, torch.Tensor.backward, model.zero_grad)


def ddp_adamw(model: LanguageModel, _: Batch, *, static: bool = False, hook: Any = None) -> Trainer:
    """DDP with ``gradient_as_bucket_view``, and AdamW; ``hook`` is a communication hook."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return trainer(wrapped, torch.optim.AdamW(wrapped.parameters(), **HYPERS))


def _ddp_adamw_of_a_share(model: LanguageModel, _: Batch) -> Trainer:
    """DDP, and AdamW of about 1/world_size of the parameters, the same on every rank: the rest is not trained."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    left, stepped = (
        sum(map(Tensor.numel, wrapped.parameters())) / torch.distributed.get_world_size(),
        list[nn.Parameter](),
    )
    for param in sorted(wrapped.parameters(), key=Tensor.numel, reverse=True):
        if param.numel() <= left:
            stepped.append(param)
            left -= param.numel()
    optimizer = torch.optim.AdamW(stepped, **HYPERS)

    def step() -> None:
        optimizer.step()
        wrapped.zero_grad()

    return Trainer(wrapped, torch.Tensor.backward, step)


def zero_redundancy(model: LanguageModel, _: Batch) -> Trainer:
    """DDP with ``gradient_as_bucket_view``, and ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return trainer(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **HYPERS))


def _fsdp2(model: LanguageModel, _: Batch) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return trainer(model, torch.optim.AdamW(model.parameters(), **HYPERS))


def deepspeed_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, zero: dict[str, Any], rows: int = 1, **config: Any
) -> Any:
    """Return DeepSpeed's ZeRO-2 over the default group, with more settings of ``zero_optimization`` and beside it."""
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend())
    config["train_micro_batch_size_per_gpu"] = rows
    config["zero_optimization"] = {"stage": 2, "contiguous_gradients": True, **zero}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def deepspeed_offload_engine(model: nn.Module, params: Any, max_norm: float, **hypers: Any) -> Any:
    """Return DeepSpeed's ZeRO-2 that steps bf16 parameters with its own Adam in host memory."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    on_gpu = torch.cuda.is_available()
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": on_gpu}, "overlap_comm": on_gpu}
    optimizer = DeepSpeedCPUAdam(params, adamw_mode=True, **hypers)
    return deepspeed_engine(model, optimizer, zero, bf16={"enabled": True}, gradient_clipping=max_norm)


def _deepspeed(model: LanguageModel, batch: Batch) -> Trainer:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), **HYPERS)
    zero = {"overlap_comm": False}
    engine = deepspeed_engine(model, optimizer, zero, batch.rows, zero_allow_untested_optimizer=True)
    return Trainer(engine, engine.backward, engine.step)


def _ours(reduction: Any, *, ddp: bool = False) -> Callable[[LanguageModel, Batch], Trainer]:
    def build(model: LanguageModel, _: Batch) -> Trainer:
        wrapped: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True) if ddp else model
        optimizer = zero_opt.ShardedOptimizer(wrapped.parameters(), torch.optim.AdamW, reduction=reduction, **HYPERS)
        return trainer(wrapped, optimizer)

    return build


FLOOR, DDP, ZERO, DEEPSPEED = "compute alone", "DDP + AdamW", "DDP + ZeroRedundancyOptimizer", "DeepSpeed ZeRO-2"
STATIC_DDP = "DDP(static_graph=True) + AdamW"
SHARE = "DDP + AdamW of 1/W of the parameters"
SYSTEMS: dict[str, System] = {
    FLOOR: System(_compute_alone, trains=False),
    DDP: System(ddp_adamw),
    STATIC_DDP: System(partial(ddp_adamw, static=True)),
    SHARE: System(_ddp_adamw_of_a_share, trains=False),
    ZERO: System(zero_redundancy),
    "FSDP2 + AdamW": System(_fsdp2),
    DEEPSPEED: System(_deepspeed),
    "Overlapped()": System(_ours(zero_opt.Overlapped()), ours=True),
    "AtStep()": System(_ours(zero_opt.AtStep()), ours=True),
    "DDP + AlreadyReduced()": System(_ours(zero_opt.AlreadyReduced(), ddp=True), ours=True),
    'Overlapped(exchange="backend")': System(_ours(zero_opt.Overlapped(exchange="backend")), ours=True),
}


def missing() -> dict[str, str]:
    """Systems that cannot run here, and why."""
    if importlib.util.find_spec("deepspeed") is None:
        return {DEEPSPEED: "deepspeed is not installed"}
    return {}
