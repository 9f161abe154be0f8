"""What a second optimizer of one model costs: its step beside that of one optimizer, and what each one takes to make.

    python docs/benchmarks/several_optimizers.py [--rounds 25] [--write docs/benchmarks/results/]

Two forked gloo ranks, one thread each. One model is trained by one AdamW, and by several of which each has every n-th
layer, in turn; a step is forward, backward, ``step()`` and ``zero_grad()`` of all of them. A time is that of the slower
rank; medians count. Last, each of several optimizers that are made one after the other: seconds, and what rank 0 has
more after it.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.forked import forked, in_turn, timed
from support.machine import add_write, command, load, machine, publish, spread, today
from torch import nn

import zero_opt

WORLD_SIZE = 2
COUNTS = (1, 2, 4)  # of optimizers
WIDTH, LAYERS, ROWS = 1024, 12, 64
REDUCTIONS: dict[str, Callable[[], Any]] = {
    "Overlapped()": zero_opt.Overlapped,
    "AtStep()": zero_opt.AtStep,
    'Overlapped(exchange="backend")': lambda: zero_opt.Overlapped(exchange="backend"),
}


class Trained:
    """A model with so many optimizers."""

    def __init__(self, count: int, reduction: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
        self.optimizers = [
            zero_opt.ShardedOptimizer(
                [param for layer in layers[first::count] for param in layer.parameters()],
                torch.optim.AdamW,
                fused=True,
                reduction=reduction,
            )
            for first in range(count)
        ]

    def step(self, data: torch.Tensor) -> None:
        """Train one step."""
        self.model(data).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def close(self) -> None:
        """End the optimizers."""
        for optimizer in self.optimizers:
            optimizer.close()


def stepped(_: int, __: int, reduction: str, rounds: int) -> dict[int, list[float]]:
    """Return the seconds of training steps, by the number of optimizers."""
    made = {count: Trained(count, REDUCTIONS[reduction]()) for count in COUNTS}
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    data = torch.randn(ROWS, WIDTH)
    for turn in range(rounds + 3):
        for count, trained in in_turn(made, turn):
            seconds = timed(partial(trained.step, data))
            if turn >= 3:
                times[count].append(seconds)
    for trained in made.values():
        trained.close()
    return times


def taken() -> tuple[int, int, float]:
    """Descriptors, threads, and resident MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return *counts, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def constructed(_: int, __: int) -> list[tuple[float, ...]]:
    """Return the seconds of each optimizer's construction, and what this rank has more after its first step."""
    rows: list[tuple[float, ...]] = []
    optimizers: list[zero_opt.ShardedOptimizer] = []
    before = taken()
    for _ in range(max(COUNTS)):
        layer = nn.Linear(WIDTH // 4, WIDTH // 4)
        make = partial(zero_opt.ShardedOptimizer, list(layer.parameters()), torch.optim.AdamW)
        seconds = timed(lambda: optimizers.append(make()))  # noqa: B023
        layer(torch.randn(ROWS, WIDTH // 4)).sum().backward()
        optimizers[-1].step()
        dist.barrier()
        after = taken()
        rows.append((seconds, *(now - then for now, then in zip(after, before, strict=True))))
        before = after
    for optimizer in optimizers:
        optimizer.close()
    return rows


def report(rounds: int) -> str:
    """The result, as markdown."""
    lines = [
        f"### Several optimizers of one model, {today()}",
        "",
        f"`{command('docs/benchmarks/several_optimizers.py')}`",
        "",
        f"{machine()}; {load()}. {WORLD_SIZE} ranks, one thread each, {rounds} rounds; {LAYERS} layers of "
        f"{WIDTH} x {WIDTH}.",
        "",
        "| reduction | optimizers | training step, ms | beside one optimizer, step by step |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in REDUCTIONS:
        times = forked(stepped, WORLD_SIZE, name, rounds)[0]
        for count, values in times.items():
            ratio = statistics.median(a / b for a, b in zip(values, times[1], strict=True))
            lines.append(f"| `{name}` | {count} | {spread([1e3 * value for value in values], 1)} | {ratio:.3f} |")
    rows = forked(constructed, WORLD_SIZE)[0]
    lines += ["", "| optimizer | made in, s | descriptors more | threads more | resident MiB more |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for number, (seconds, descriptors, threads, mib) in enumerate(rows, 1):
        lines.append(f"| {number} | {seconds:.3f} | {descriptors} | {threads} | {mib:.1f} |")
    lines += ["", "The first one also imports what all of them need."]
    return "\n".join(lines)


def main() -> None:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    add_write(parser)
    arguments = parser.parse_args()
    text = report(arguments.rounds)
    publish(arguments.write, "several_optimizers", text)


if __name__ == "__main__":
    main()
