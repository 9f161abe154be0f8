"""The systems that gpu.py compares, each brought to one form: a loss, its backward, a step."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.systems import Trainer, deepspeed_offload_engine, trainer
from torch import Tensor, nn
from torch.nn import functional

import zero_opt

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from text_model import GPT, VOCABULARY, ModelSize, parameter_groups

HYPERS: dict[str, Any] = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
HEAD_WIDTH = 64
# Width per layer of usual models: 2048 in 24 layers are 1.2 B parameters.
ASPECT = 2048 / 24
MASTERS = zero_opt.MixedPrecision(master_dtype=torch.float32)


class Loss(nn.Module):
    """The demo's byte-level GPT, whose forward returns the mean cross entropy."""

    def __init__(self, size: ModelSize, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = GPT(size).to(dtype)

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the loss, in fp32; targets of -100 do not count."""
        logits = self.model(tokens).float().view(-1, VOCABULARY)
        return functional.cross_entropy(logits, targets.reshape(-1), reduction=reduction)


def size_for(params: float, context: int) -> ModelSize:
    """Return a model of about so many parameters."""
    layers = max(1, round((params / 12 / ASPECT**2) ** (1 / 3)))
    heads = max(1, round((params / 12 / layers) ** 0.5 / HEAD_WIDTH))
    return ModelSize(heads * HEAD_WIDTH, layers, heads, context)


class Masters:
    """torch's AdamW over fp32 copies of parameters that are cast forth and back, as a training loop does by hand.

    Attributes:
        param_groups: of torch's optimizer, so that a schedule sets the learning rate.

    Args:
        max_norm: gradients are clipped to it.
    """

    def __init__(self, groups: list[dict[str, Any]], max_norm: float, **arguments: Any) -> None:
        self._params = [param for group in groups for param in group["params"]]
        copies = {param: param.detach().float().clone().requires_grad_() for param in self._params}
        self._masters, self._max_norm = list(copies.values()), max_norm
        own = [{**group, "params": [copies[param] for param in group["params"]]} for group in groups]
        self._optimizer = torch.optim.AdamW(own, fused=True, **arguments)
        self.param_groups = self._optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Cast the gradients, clip, step, cast the parameters."""
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        torch.nn.utils.clip_grad_norm_(self._masters, self._max_norm)
        self._optimizer.step()
        torch._foreach_copy_(self._params, self._masters)
        self._optimizer.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients of the parameters."""
        for param in self._params:
            param.grad = None


def ours(offload: Any, *, late: bool = False) -> Callable[[Loss, float], Trainer]:
    """ShardedOptimizer with an offload, and parameters that arrive late if asked for."""

    def build(model: Loss, max_norm: float) -> Trainer:
        optimizer = zero_opt.ShardedOptimizer(
            parameter_groups(model),
            torch.optim.AdamW,
            reduction=zero_opt.Overlapped(overlap_param_gather=model if late else None),
            offload=offload,
            precision=MASTERS if offload is None else zero_opt.MixedPrecision(),
            max_grad_norm=max_norm,
            fused=True,
            **HYPERS,
        )

        return trainer(model, optimizer)

    return build


def autograd_alone(model: Loss, _: float) -> Trainer:
    """No step."""
    return Trainer(model, Tensor.backward, lambda: model.zero_grad())


def torch_masters(model: Loss, max_norm: float) -> Trainer:
    """torch's fused AdamW with fp32 masters by hand."""
    return trainer(model, Masters(parameter_groups(model), max_norm, **HYPERS))


def torch_narrow(model: Loss, max_norm: float) -> Trainer:
    """torch's fused AdamW on the parameters as they are: state of their dtype, no masters."""
    optimizer = torch.optim.AdamW(parameter_groups(model), fused=True, **HYPERS)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, Tensor.backward, step)


def deepspeed_offload(model: Loss, max_norm: float) -> Trainer:
    """ZeRO-2 with its own engine and its own Adam in host memory."""
    engine = deepspeed_offload_engine(model, parameter_groups(model), max_norm, **HYPERS)
    return Trainer(engine, engine.backward, engine.step)


def torchao_offload(model: Loss, _: float) -> Trainer:
    """State and gradients in host memory, of the parameters' dtype; no masters, no clipping."""
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(parameter_groups(model), torch.optim.AdamW, fused=True, **HYPERS)
    return trainer(model, optimizer)


@dataclass(frozen=True)
class System:
    """A row: what it is called in the table, how it is built, the package that it needs."""

    label: str
    build: Callable[[Loss, float], Trainer]
    package: str | None = None

    def missing(self, device: str) -> str | None:
        """Return why it cannot run here, or None."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.package == "torchao" and device != "cuda":
            return "torchao's is for CUDA alone"
        return None


_WORKER, _LATE = zero_opt.WorkerOffload, ", `overlap_param_gather`"
SYSTEMS: dict[str, System] = {
    "alone": System("no step", autograd_alone),
    "torch": System("torch AdamW, fused, fp32 masters by hand", torch_masters),
    "torch-bf16": System("torch AdamW, fused, bf16 state, no masters", torch_narrow),
    "none": System("`offload=None`, fp32 masters", ours(None)),
    "cpu": System("`CPUOffload()`", ours(zero_opt.CPUOffload())),
    "worker": System("`WorkerOffload()`", ours(_WORKER())),
    "worker-late": System(f"`WorkerOffload()`{_LATE}", ours(_WORKER(), late=True)),
    "delay": System("`WorkerOffload(delay=1)`", ours(_WORKER(delay=1))),
    "speculate": System("`WorkerOffload(speculate=True)`", ours(_WORKER(speculate=True))),
    "speculate-late": System(f"`WorkerOffload(speculate=True)`{_LATE}", ours(_WORKER(speculate=True), late=True)),
    "deepspeed": System("DeepSpeed ZeRO-2, `offload_optimizer` to the CPU", deepspeed_offload, "deepspeed"),
    "torchao": System("torchao `CPUOffloadOptimizer`, bf16 state, no masters, no clipping", torchao_offload, "torchao"),
}
