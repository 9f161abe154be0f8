"""Measures one system of gpu.py in this process: times, and the device's memory."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.gpu_systems import SYSTEMS, VOCABULARY, Loss, size_for
from support.systems import Trainer
from torch import Tensor

# Never reached, so nothing is clipped; but every system has to know the norm.
MAX_NORM = 1e9
GIB = float(1 << 30)


@dataclass(frozen=True)
class Size:
    """What is trained, and for how long.

    Attributes:
        params: about how many the model has. batch, context: windows per step, and bytes of each.
        rounds, steps: of so many steps each.
    """

    device: str
    params: float
    batch: int
    context: int
    rounds: int
    steps: int
    warmup: int = 3


class Clock:
    """Marks on the stream that the device works on; where there is no device, in the host's time."""

    def __init__(self, device: str) -> None:
        self._device, self._events = device, device == "cuda"

    def mark(self) -> Any:
        """Mark the end of what has been enqueued."""
        if not self._events:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds from mark to mark; both have passed."""
        return float(begin.elapsed_time(end)) if self._events else 1e3 * (end - begin)


@dataclass
class Times:
    """Of each round, means per step in ms.

    Attributes:
        iteration: forward, backward and step, on the host's clock; the host waits for the device once per round.
        step: the call of ``step()`` on the host; the host may wait in it for a backward that it has run ahead of.
        gap: from the end of backward to the end of the step, on the device's stream.
    """

    iteration: list[float]
    step: list[float]
    gap: list[float]


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.accelerator.synchronize()


def trained(trainer: Trainer, batches: Sequence[tuple[Tensor, Tensor]], size: Size) -> Times:
    """Train, round by round."""
    clock, times = Clock(size.device), Times([], [], [])
    for number in range(-1, size.rounds):
        count = size.warmup if number < 0 else size.steps
        marks, stepping = [], 0.0
        synchronize(size.device)
        begin = time.perf_counter()
        for step in range(count):
            trainer.backward(trainer.forward(*batches[step % len(batches)]))
            after_backward, called = clock.mark(), time.perf_counter()
            trainer.step()
            stepping += time.perf_counter() - called
            marks.append((after_backward, clock.mark()))
        synchronize(size.device)
        taken = time.perf_counter() - begin
        if number < 0:
            if size.device != "cpu":
                torch.accelerator.reset_peak_memory_stats()
            continue
        times.iteration.append(1e3 * taken / count)
        times.step.append(1e3 * stepping / count)
        times.gap.append(sum(clock.between(*pair) for pair in marks) / count)
    return times


def peaks(device: str) -> tuple[float, float]:
    """Return the most GiB that tensors had, and that torch's allocator took from the device."""
    if device == "cpu":
        return 0.0, 0.0
    return torch.accelerator.max_memory_allocated() / GIB, torch.accelerator.max_memory_reserved() / GIB


def random_batches(size: Size, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Return random bytes."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (count, size.batch, size.context + 1), generator=generator).to(size.device)
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in text]


def join_a_group_of_one(device: str) -> None:
    """Make a process group of this process alone: DeepSpeed needs one."""
    warnings.simplefilter("ignore")  # the peers' own deprecations
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def measured(name: str, size: Size) -> dict[str, Any]:
    """Train the bare model, then the same one with a system; return times and memory of both."""
    join_a_group_of_one(size.device)
    model = Loss(size_for(size.params, size.context), torch.bfloat16).to(size.device)
    batches = random_batches(size)
    bare = trained(SYSTEMS["alone"].build(model, MAX_NORM), batches, size)
    bare_allocated, bare_reserved = peaks(size.device)
    if size.device != "cpu":
        torch.accelerator.empty_cache()
    trainer = SYSTEMS[name].build(model, MAX_NORM)
    times = trained(trainer, batches, size)
    allocated, reserved = peaks(size.device)
    trainer.settle()
    return {
        "params": sum(param.numel() for param in model.parameters()),
        "bare": bare.iteration,
        "iteration": times.iteration,
        "step": times.step,
        "gap": times.gap,
        "allocated": allocated,
        "reserved": reserved,
        "bare_allocated": bare_allocated,
        "bare_reserved": bare_reserved,
    }
