"""How long it takes to bring a 33.6 M-parameter AdamW's state to one of two ranks, beside ZeroRedundancyOptimizer.

    python docs/benchmarks/consolidate.py [--write docs/benchmarks/results/]

Two forked gloo ranks, one thread each, hold the same parameters in both optimizers. Rounds alternate between the
two, a step before each, so that both meet the same machine. A time is that of the slower rank; medians count. In
each round rank 0 also calls `state_dict()` alone, and the least that bringing the bytes can cost is taken: to send one
rank's half of them in one message into new memory, and to copy the other half into new memory.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.forked import forked, timed
from support.machine import add_write, command, load, machine, publish, say, spread, today
from support.model import make_model

import zero_opt

WORLD_SIZE = 2
Times = dict[str, list[float]]
ALONE, FLOOR = "state_dict() on rank 0 alone", "bytes"


def optimizers() -> dict[str, torch.optim.Optimizer]:
    """The two that are compared, each over its own parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ours = zero_opt.ShardedOptimizer(
        make_model(1).parameters(), torch.optim.AdamW, reduction=zero_opt.AlreadyReduced(), lr=1e-3, foreach=True
    )
    peer = ZeroRedundancyOptimizer(make_model(1).parameters(), torch.optim.AdamW, lr=1e-3, foreach=True)
    return {"zero_opt": ours, "ZeroRedundancyOptimizer": peer}


def fill_gradients(optimizer: torch.optim.Optimizer) -> None:
    """The same on every rank."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 1e-3)


def peak_mb(call: Callable[[], Any]) -> float:
    """The most memory, in MB above what there was before, that this process has had during `call`."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status_mb("VmRSS")
    result = call()
    peak = status_mb("VmHWM") - before
    del result
    return peak


def status_mb(name: str) -> float:
    """A line of /proc/self/status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError(name)


def least(rank: int, half: torch.Tensor) -> Callable[[], Any]:
    """Send rank 1's half into new memory of rank 0, and copy rank 0's own."""

    def run() -> None:
        if rank:
            dist.send(half, 0)
        else:
            came = torch.empty_like(half)
            dist.recv(came, 1)
            torch.empty_like(half).copy_(half)

    return run


def measure_alone(rank: int, optimizer: Any, times: Times, peaks: Times) -> None:
    """`state_dict()` on rank 0 alone, the least it could take, and the memory that both ways need."""
    half = torch.ones(sum(p.numel() for group in optimizer.param_groups for p in group["params"]))

    def ask() -> Any:
        return optimizer.state_dict() if rank == 0 else None

    for name, call in ((ALONE, ask), (FLOOR, least(rank, half))):
        optimizer.step()
        times[name].append(timed(call))
    del half
    optimizer.step()
    for name, call in ((ALONE, ask), ("zero_opt", lambda: optimizer.consolidate_state_dict(to=0))):
        dist.barrier()
        peak = torch.zeros(WORLD_SIZE, dtype=torch.float64)
        peak[rank] = peak_mb(lambda c=call: (c(), dist.barrier())[0])
        dist.all_reduce(peak)
        for at in range(WORLD_SIZE):
            peaks[f"{name} {at}"].append(peak[at].item())


def measured(rank: int, _: int, rounds: int) -> tuple[Times, Times]:
    """Return the times of the slower rank, and the peaks of memory."""
    contenders: dict[str, Any] = optimizers()
    times: Times = {f"{name}{part}": [] for name in contenders for part in ("", " state_dict")}
    times |= {ALONE: [], FLOOR: []}
    peaks: Times = {f"{name} {at}": [] for name in (ALONE, "zero_opt") for at in range(WORLD_SIZE)}
    for optimizer in contenders.values():
        fill_gradients(optimizer)
    for number in range(rounds):
        measure_alone(rank, contenders["zero_opt"], times, peaks)
        for name, optimizer in contenders.items():
            optimizer.step()
            times[name].append(timed(lambda o=optimizer: o.consolidate_state_dict(to=0)))
            times[f"{name} state_dict"].append(timed(lambda o=optimizer: o.state_dict() if rank == 0 else None))
            if rank == 0:
                say(f"round {number + 1}: {name} {times[name][-1]:.3f} s")
    if rank == 0:
        check_same_state(contenders)
    return times, peaks


def check_same_state(contenders: dict[str, Any]) -> None:
    """Both must have brought the same number of bytes, or the times compare nothing."""
    sizes = set()
    for optimizer in contenders.values():
        states = optimizer.state_dict()["state"].values()
        sizes.add(sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor)))
    assert len(sizes) == 1, sizes


def report(times: Times, peaks: Times, rounds: int) -> str:
    """The result as markdown."""
    count = sum(p.numel() for p in make_model(1).parameters())
    alone, both = ratio(times, ("",)), ratio(times, ("", " state_dict"))
    lines = [
        f"### consolidate_state_dict, {today()}",
        "",
        f"`{command('docs/benchmarks/consolidate.py')}`",
        "",
        f"{machine()}; {load()}.",
        "",
        f"AdamW over {count:,} fp32 parameters ({8 * count / 1e6:.0f} MB of state), {WORLD_SIZE} gloo ranks with one "
        f"thread each, {rounds} interleaved rounds.",
        "",
        "| seconds, median (least - most) | consolidate_state_dict(to=0) | state_dict() on rank 0 |",
        "| --- | --- | --- |",
    ]
    for name in ("zero_opt", "ZeroRedundancyOptimizer"):
        lines.append(f"| {name} | {spread(times[name])} | {spread(times[f'{name} state_dict'])} |")
    said = (
        f"ZeroRedundancyOptimizer takes {alone:.0f} times as long to consolidate, {both:.0f} times with `state_dict()`."
    )
    floor, mb = statistics.median(times[FLOOR]), 8 * count / 1e6
    alone_s, brought_s = (statistics.median(times[name]) for name in (ALONE, "zero_opt"))
    lines += ["", said, ""]
    lines.append(
        f"`state_dict()` of zero_opt on rank 0 alone, without a consolidation: {spread(times[ALONE])} s. Sending half "
        f"of the bytes in one message and touching the memory of all: {spread(times[FLOOR])} s, so the first is "
        f"{alone_s / floor:.2f} times that, `consolidate_state_dict` {brought_s / floor:.2f} times."
    )
    lines += ["", "| peak memory in MB, most of all rounds | rank 0, beside the dict | rank 1 |", "| --- | --- | --- |"]
    for name, call in ((ALONE, "state_dict() on rank 0 alone"), ("zero_opt", "consolidate_state_dict(to=0)")):
        lines.append(f"| {call} | {max(peaks[f'{name} 0']) - mb:.0f} | {max(peaks[f'{name} 1']):.0f} |")
    return "\n".join(lines)


def ratio(times: Times, parts: tuple[str, ...]) -> float:
    """Medians of the peer's rounds over ours, each round the sum of `parts`."""
    medians = [
        statistics.median(map(sum, zip(*(times[f"{name}{part}"] for part in parts))))
        for name in ("ZeroRedundancyOptimizer", "zero_opt")
    ]
    return medians[0] / medians[1]


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    add_write(parser)
    arguments = parser.parse_args()
    text = report(*forked(measured, WORLD_SIZE, arguments.rounds)[0], arguments.rounds)
    publish(arguments.write, "consolidate", text)


if __name__ == "__main__":
    main()
