"""CPUOffload's step in a rank that torchrun has started, compared with one in a program started without torchrun.

torchrun sets OMP_NUM_THREADS=1 when it starts several ranks; ``omp=1`` below is one rank with that set. Launchers take
turns, and of each the least time of a step counts: other load on the machine only adds to it. Ratios are taken within a
round.

Run: python docs/benchmarks/torchrun_threads.py [--numel N] [--rounds R] [--steps S] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from support.machine import add_write, command, load, machine, publish, spread, today

import zero_opt

SCRIPT = "docs/benchmarks/torchrun_threads.py"
LAUNCHERS = {
    "python": ([sys.executable], {}),
    "torchrun": ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"], {}),
    "torchrun, omp=1": (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"],
        {"OMP_NUM_THREADS": "1"},
    ),
}
CLASSES = {"AdamW": (torch.optim.AdamW, {"fused": True}), "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9})}


def step_ms(name: str, numel: int, steps: int) -> float:
    """The least time of a step, in this process."""
    cls, options = CLASSES[name]
    param = torch.nn.Parameter(torch.full((numel,), 0.5))
    optimizer = zero_opt.ShardedOptimizer([param], cls, offload=zero_opt.CPUOffload(), **options)
    param.grad = torch.full_like(param, 1e-3)
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    optimizer.close()
    return min(times[2:])


def launched_ms(launcher: str, arguments: Sequence[str]) -> list[float]:
    """The times that a rank prints: :func:`step_ms` of each class."""
    words, extra = LAUNCHERS[launcher]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*words, __file__, "--rank", *arguments],
        env={**environment, **extra},
        check=True,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    """Print a table, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--numel", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", action="store_true", help="be the program that is measured")
    add_write(parser)
    options = parser.parse_args()
    if options.rank:
        print(*(step_ms(name, options.numel, options.steps) for name in CLASSES))
        return
    arguments = [f"--numel={options.numel}", f"--steps={options.steps}"]
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for launcher in LAUNCHERS:
            for name, value in zip(CLASSES, launched_ms(launcher, arguments), strict=True):
                found.setdefault((name, launcher), []).append(value)
    lines = [f"### CPUOffload's step under torchrun, {today()}", "", f"`{command(SCRIPT)}`", ""]
    lines += [f"{machine()}; {load()}.", "", f"One fp32 parameter of {options.numel} elements.", ""]
    lines += ["| class | started by | step, ms: rounds | beside python, by round |", "| --- | --- | --- | --- |"]
    for (name, launcher), values in found.items():
        ratios = [a / b for a, b in zip(values, found[name, "python"], strict=True)]
        lines.append(f"| {name} | {launcher} | {spread(values, 2)} | {spread(ratios, 2)} |")
    publish(options.write, "torchrun_threads", "\n".join(lines))


if __name__ == "__main__":
    main()
