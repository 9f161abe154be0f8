"""What it costs a step to be observed: ``opt.stats()``, and labels for profilers, with and without.

    python docs/benchmarks/observing.py [--ranks 2] [--rounds 100] [--write FOLDER]

Steps with and without alternate in the same run; *without*, phases neither look at a clock nor have labels. The figures
are the difference of neighbors, its mean with an interval of 95 %, and the processor time of one phase and of one call
of ``stats()``, times how many a step has.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.forked import forked
from support.machine import add_write, command, load, machine, publish, today
from torch import nn

import zero_opt
from zero_opt.system.phases import Phase, Seconds

_CALLS = 20_000


@contextmanager
def unobserved() -> Iterator[None]:
    """Phases are nothing."""
    context = nullcontext()

    def nothing(*_: Any) -> Any:  # a mock takes longer to call than a phase
        return context

    with contextlib.ExitStack() as patches:
        for module in list(sys.modules.values()):  # each has the name of its own
            if module is not sys.modules[__name__] and vars(module).get("Phase") is Phase:
                patches.enter_context(mock.patch.object(module, "Phase", nothing))
        patches.enter_context(mock.patch.object(Seconds, "counted", nothing))
        yield


def each_us(call: Any) -> float:
    """Microseconds of processor time of one call."""
    begin = time.thread_time()
    for _ in range(_CALLS):
        call()
    return (time.thread_time() - begin) / _CALLS * 1e6


def phase() -> None:
    """Enter and leave one phase."""
    with Phase("update"):
        pass


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the phases of all threads."""
    count, enter = [0], Phase.__enter__

    def note(self: Phase) -> None:
        count[0] += 1
        enter(self)

    with mock.patch.object(Phase, "__enter__", note):
        yield count


Observed = tuple[list[float], list[float], int, float, float]


def observed(_: int, __: int, rounds: int) -> Observed:
    """Return differences of steps, steps without, phases of a step, and microseconds of a phase and of ``stats()``."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    opt = zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, fused=True, max_grad_norm=1.0)
    data = torch.randn(32, 512)

    def step(context: Any) -> float:
        with context:
            dist.barrier()
            begin = time.perf_counter()
            opt.zero_grad()
            model(data).square().mean().backward()
            opt.step()
            opt.stats()
            return time.perf_counter() - begin

    for _ in range(5):
        step(nullcontext())
    with counted() as count:
        step(nullcontext())
    differences, bare = [], []
    for turn in range(rounds):
        order = (True, False) if turn % 2 else (False, True)
        seconds = {labeled: step(nullcontext() if labeled else unobserved()) for labeled in order}
        differences.append(seconds[True] - seconds[False])
        bare.append(seconds[False])
    with Seconds().counted("other"):
        phase_us = each_us(phase)
    stats_us = each_us(opt.stats)
    opt.close()
    return differences, bare, count[0], phase_us, stats_us


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100, help="pairs of steps")
    add_write(parser)
    given = parser.parse_args()
    differences, bare, count, phase_us, stats_us = forked(observed, given.ranks, given.rounds)[0]
    mean, half = statistics.fmean(differences), 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))
    lines = [
        f"### The cost of being observed, {today()}",
        "",
        f"{machine()}; {load()}; `{command('docs/benchmarks/observing.py')}`",
        "",
        "| | |",
        "| --- | ---: |",
        f"| a step unobserved, median | {1e3 * statistics.median(bare):.2f} ms |",
        f"| observed less unobserved, mean of {len(differences)} pairs | {1e3 * mean:+.3f} ± {1e3 * half:.3f} ms |",
        f"| phases per step, of all threads | {count} |",
        f"| one phase | {phase_us:.2f} us of processor |",
        f"| one `stats()` | {stats_us:.1f} us of processor |",
        f"| per step: phases and one `stats()` | {(count * phase_us + stats_us) / 1e3:.3f} ms of processor |",
    ]
    publish(given.write, "observing", "\n".join(lines))


if __name__ == "__main__":
    main()
