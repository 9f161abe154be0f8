"""Processor time of a Muon step: 12 matrices of 512 x 2048 over 4 ranks, beside ranks that step every matrix.

    python docs/benchmarks/muon.py [--rounds 3] [--shape 512 2048] [--write docs/benchmarks/results/]

Forked gloo ranks, one thread each, step the same matrices in turn: sharded by ``ShardedOptimizer``, and by a plain
``torch.optim.Muon``, as every rank does under DDP. Of that rank 0's time stands for all, since the other ranks would
only do the same; they wait. All ranks have the same gradients, whose mean has their bits. The time is that of the
processor in ``step()``, all threads of a rank together, so that it means the same on a machine with fewer cores than
ranks; the exchange of updated matrices is in it. Of each rank the median over rounds counts. At the end all parameters
must have the bits of the plain optimizer's. Where the processor has no instructions for bf16, torch takes many seconds
per matrix of this size; ``--shape 128 512`` then ends in a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.forked import forked
from support.machine import add_write, command, load, machine, publish, spread, today
from torch import nn

import zero_opt

WORLD_SIZE = 4
MATRICES = 12
WARMUP = 1
SHARDED, EVERY = "zero_opt", "every rank steps every matrix"
# The most that the busiest rank takes beside the mean, and a step beside one of every matrix.
MOST_BESIDE_MEAN, MOST_BESIDE_EVERY = 1.10, 0.35

Times = dict[str, list[float]]


def matrices(shape: Sequence[int]) -> list[nn.Parameter]:
    """The same values on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator) / shape[1] ** 0.5) for _ in range(MATRICES)]


def step_seconds(params: list[nn.Parameter], optimizer: Any, turn: int) -> float:
    """Return the processor time of one step, with gradients that all ranks have alike; 0 without an optimizer."""
    if optimizer is None:
        dist.barrier()
        return 0.0
    generator = torch.Generator().manual_seed(1 + turn)
    torch.autograd.backward(params, [torch.randn(param.shape, generator=generator) for param in params])
    dist.barrier()
    begin = time.process_time()
    optimizer.step()
    seconds = time.process_time() - begin
    optimizer.zero_grad()
    return seconds


Measured = tuple[Times, dict[str, float], bool]


def measured(rank: int, _: int, shape: Sequence[int], rounds: int) -> Measured:
    """Return this rank's times, the figures of its last step, and whether the bits are the same."""
    plain, params = matrices(shape), matrices(shape)
    sharded = zero_opt.ShardedOptimizer(params, torch.optim.Muon, lr=0.02)
    made = {SHARDED: (params, sharded), EVERY: (plain, None if rank else torch.optim.Muon(plain, lr=0.02))}
    times: Times = {name: [] for name in made}
    for turn in range(WARMUP + rounds):
        for name, (stepped, optimizer) in made.items():
            seconds = step_seconds(stepped, optimizer, turn)
            if turn >= WARMUP:
                times[name].append(seconds)
    for matrix in plain:
        dist.broadcast(matrix.detach(), src=0)
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(params, plain, strict=True))
    figures = sharded.stats()
    sharded.close()
    return times, figures, same


def report(found: list[Measured]) -> tuple[list[str], bool]:
    """Return the lines of the result, and whether it is within its bounds."""
    lines = ["| | processor time, s |", "| --- | ---: |"]
    lines += [f"| zero_opt, rank {rank} | {spread(times[SHARDED])} |" for rank, (times, _, _) in enumerate(found)]
    lines += [f"| {EVERY} | {spread(found[0][0][EVERY])} |"]
    ours, every = [statistics.median(times[SHARDED]) for times, _, _ in found], statistics.median(found[0][0][EVERY])
    beside_mean = max(ours) / statistics.mean(ours)
    beside_every = max(ours) / every
    same = all(equal for *_, equal in found)
    figures = found[0][1]
    lines += [
        "",
        f"The busiest rank takes {beside_mean:.3f} of the mean (at most {MOST_BESIDE_MEAN:.2f}), and "
        f"{beside_every:.3f} of a step of every matrix (at most {MOST_BESIDE_EVERY:.2f}).",
        f"Bits equal to torch.optim.Muon's: {'yes' if same else 'NO'}.",
        f"Of rank 0's last step: {1e3 * figures['exposed/update_s']:.0f} ms in the class, "
        f"{1e3 * figures['exposed/gather_s']:.0f} ms waiting for updated matrices, "
        f"{1e3 * figures['hidden/exchange_s']:.0f} ms of exchange beside other work (wall time).",
    ]
    return lines, same and beside_mean <= MOST_BESIDE_MEAN and beside_every <= MOST_BESIDE_EVERY


def main() -> int:
    """Measure, print, and write if asked to; 0 if all is within bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", type=int, nargs=2, default=(512, 2048), help="of each matrix")
    add_write(parser)
    arguments = parser.parse_args()
    lines = [f"### A Muon step, {today()}", "", f"`{command('docs/benchmarks/muon.py')}`", ""]
    table, good = report(forked(measured, WORLD_SIZE, arguments.shape, arguments.rounds))
    lines += [
        f"{machine()}; {load()}. {WORLD_SIZE} ranks, one thread each, {MATRICES} matrices of "
        f"{arguments.shape[0]} x {arguments.shape[1]}, "
        f"{arguments.rounds} rounds; processor time of `step()`.",
        "",
        *table,
    ]
    text = "\n".join(lines)
    publish(arguments.write, "muon", text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
