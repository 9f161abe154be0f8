"""One step of every native update on the CPU, beside torch's fused one and the time to read and write as many bytes.

    python docs/benchmarks/updates.py [--write docs/benchmarks/results/]

Rounds alternate between contenders, whose arrays lie in the same memory, so that all meet the same machine; medians
count, of each round's ratio.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.contenders import MOVING, Contender, Contenders, Place, Times, measure, moving
from support.machine import add_write, command, load, machine, publish, today
from torch.nn import Parameter

import zero_opt
from zero_opt import _native

SCRIPT = "docs/benchmarks/updates.py"
AIM = 1.05
Make = Callable[[list[Parameter]], torch.optim.Optimizer]


def updates(threads: int) -> dict[str, tuple[int, Make, Make | None]]:
    """By name: how many arrays of state, ours, and torch's fused one if there is one."""
    own: dict[str, Any] = {"threads": threads}
    momentum: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}
    return {
        "SGD": (
            0,
            lambda params: zero_opt.CPUSGD(params, lr=1e-3, **own),
            lambda params: torch.optim.SGD(params, lr=1e-3, fused=True),
        ),
        "SGD with momentum": (
            1,
            lambda params: zero_opt.CPUSGD(params, **momentum, **own),
            lambda params: torch.optim.SGD(params, **momentum, fused=True),
        ),
        "Adagrad": (
            1,
            lambda params: zero_opt.CPUAdagrad(params, **own),
            lambda params: torch.optim.Adagrad(params, fused=True),
        ),
        "Lion": (1, lambda params: zero_opt.CPULion(params, **own), None),
        "AdamW": (
            2,
            lambda params: zero_opt.CPUAdamW(params, **own),
            lambda params: torch.optim.AdamW(params, fused=True),
        ),
    }


def contenders(numel: int, arrays: int, ours: Make, theirs: Make | None, place: Place) -> Contenders:
    """Steps of one update."""
    made: Contenders = {}
    for name, make in (("zero_opt", ours), ("torch fused", theirs)):
        if make is not None:
            room = place.room()
            optimizer = make([room.param(numel)])
            room.move_state(optimizer)
            made[name] = Contender(optimizer.step, room)
    return made | {MOVING: moving(numel, place, arrays=arrays)}


def row(name: str, times: Times) -> str:
    """Medians, and the medians of the rounds' ratios."""

    def ratio(unit: str) -> str:
        pairs = zip(times["zero_opt"], times.get(unit, ()))
        found = [a / b for a, b in pairs]
        return f"{statistics.median(found):.2f}" if found else ""

    middle = [f"{statistics.median(times[key]):.1f}" if key in times else "" for key in ("zero_opt", "torch fused")]
    return f"| {name} | {middle[0]} | {middle[1]} | {ratio('torch fused')} | {ratio(MOVING)} |"


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mi", type=float, default=64, help="size, in 2^20 elements")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    add_write(parser)
    arguments = parser.parse_args()
    numel = int(arguments.mi * 2**20)
    torch.set_num_threads(arguments.threads)
    lines = [f"### Native updates on the CPU, {today()}", "", f"`{command(SCRIPT)}`", ""]
    lines += [f"{machine()}; kernels {_native.isa()}; {load()}.", ""]
    lines += [
        f"fp32, {arguments.mi:g} Mi elements, {arguments.threads} threads. At most {AIM} times as long as {MOVING}"
    ]
    lines += ["is the aim, and no longer than torch.", ""]
    lines += ["| update | ms, median | torch fused | of torch's time | of the time of " + MOVING + " |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for name, (arrays, ours, theirs) in updates(arguments.threads).items():
        make = partial(contenders, numel, arrays, ours, theirs)
        lines.append(row(name, measure(make, (8 + 4 * arrays) * numel, arguments.rounds)))
    text = "\n".join(lines)
    publish(arguments.write, "updates", text)


if __name__ == "__main__":
    main()
