"""Curves of one model on the demo's text: zero_opt's offloads beside torch's AdamW with the same masters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from support.convergence import held_out_bits, learning_rate
from support.gpu_systems import HYPERS, MASTERS, Loss, Masters, parameter_groups, size_for
from support.machine import say
from torch import Tensor

import zero_opt

# The folder of the examples is in sys.path since support.gpu_systems was imported.
from text_data import Corpus, load_corpus, random_batch  # isort: skip

MAX_NORM = 1.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
INTERVALS = 10
TORCH = "torch AdamW"


def _torch(model: Loss) -> Any:
    return Masters(parameter_groups(model), MAX_NORM, **HYPERS)


def _ours(offload: Any) -> Callable[[Loss], Any]:
    def build(model: Loss) -> Any:
        narrow = next(model.parameters()).dtype != torch.float32
        precision = MASTERS if offload is None and narrow else zero_opt.MixedPrecision()
        return zero_opt.ShardedOptimizer(
            parameter_groups(model),
            torch.optim.AdamW,
            offload=offload,
            precision=precision,
            max_grad_norm=MAX_NORM,
            fused=True,
            **HYPERS,
        )

    return build


CONTENDERS: dict[str, Callable[[Loss], Any]] = {
    TORCH: _torch,
    "`offload=None`": _ours(None),
    "`CPUOffload()`": _ours(zero_opt.CPUOffload()),
    "`WorkerOffload()`": _ours(zero_opt.WorkerOffload()),
}


@dataclass(frozen=True)
class Course:
    """What is trained: a model of about ``params`` parameters, on ``batch`` windows of ``context`` bytes per step."""

    device: str
    params: float
    batch: int
    context: int
    steps: int


@dataclass
class Curve:
    """Bits per byte: of each step's batch, and over the held-out text in the end."""

    training: list[float] = field(default_factory=list)
    held_out: float = math.nan


def train(build: Callable[[Loss], Any], dtype: torch.dtype, course: Course, corpus: Corpus) -> Curve:
    """Train the same model on the same batches."""
    model = Loss(size_for(course.params, course.context), dtype).to(course.device)
    optimizer, curve, losses = build(model), Curve(), []

    def on_device(tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return model(tokens.to(course.device), targets.to(course.device), reduction)

    for step in range(course.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(HYPERS["lr"], step, course.steps)
        tokens, targets = random_batch(corpus.train, course.batch, course.context, step)
        loss = on_device(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    curve.training = (torch.stack(losses) / math.log(2)).tolist()
    curve.held_out = held_out_bits(on_device, corpus, course.context, course.batch)
    if isinstance(optimizer, zero_opt.ShardedOptimizer):
        optimizer.close()
    return curve


def table(dtype: str, curves: dict[str, Curve], steps: int) -> Iterator[str]:
    """Yield Markdown of one dtype."""
    yield f"| {dtype}, bits per byte | {' | '.join(curves)} |"
    yield f"| --- |{' ---: |' * len(curves)}"
    bounds = sorted({round(steps * index / INTERVALS) for index in range(INTERVALS + 1)})
    for begin, end in pairwise(bounds):
        means = [f"{statistics.fmean(curve.training[begin:end]):.4f}" for curve in curves.values()]
        yield f"| steps {begin + 1} - {end} | {' | '.join(means)} |"
    yield f"| held-out text | {' | '.join(f'{curve.held_out:.4f}' for curve in curves.values())} |"
    plain = curves[TORCH].training
    far = [max(abs(a - b) for a, b in zip(c.training, plain, strict=True)) for c in curves.values()]
    yield f"| largest difference from {TORCH} in a step | {' | '.join(f'{value:.4f}' for value in far)} |"
    yield ""


def convergence(course: Course, dtypes: list[str]) -> Iterator[str]:
    """Train all contenders in every dtype; yield Markdown."""
    corpus = load_corpus()
    numel = sum(param.numel() for param in Loss(size_for(course.params, course.context), torch.bfloat16).parameters())
    yield (
        f"{numel / 1e6:.1f} M parameters, {course.batch} windows of {course.context} bytes per step, {course.steps} "
        "steps, the same in every column. bf16 parameters have fp32 masters."
    )
    yield ""
    for dtype in dtypes:
        curves: dict[str, Curve] = {}
        for name, build in CONTENDERS.items():
            curves[name] = train(build, DTYPES[dtype], course, corpus)
            say(f"{dtype}, {name}: {curves[name].held_out:.4f}")
        yield from table(dtype, curves, course.steps)
