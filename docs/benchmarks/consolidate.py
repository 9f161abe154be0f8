"""How long it takes to bring a 33 M-parameter AdamW's state to one of two ranks, beside ZeroRedundancyOptimizer.

    python docs/benchmarks/consolidate.py [--write docs/benchmarks/results/]

Two forked gloo ranks, one thread each, hold the same parameters in both optimizers. Rounds alternate between the
two, a step before each, so that both meet the same machine. A time is that of the slower rank; medians count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.machine import command, load, machine, spread, today, write_result

import zero_opt

WORLD_SIZE = 2
WIDTH, LAYERS, VOCABULARY = 512, 10, 4096
Times = dict[str, list[float]]


def parameters() -> list[torch.nn.Parameter]:
    """Those of a transformer: per layer attention, a perceptron, two norms; and an embedding."""
    layer = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    layer += [(4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)] + [(WIDTH,)] * 4
    generator = torch.Generator().manual_seed(0)
    shapes = [(VOCABULARY, WIDTH), *(layer * LAYERS)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def optimizers() -> dict[str, torch.optim.Optimizer]:
    """The two that are compared, each over its own parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ours = zero_opt.ShardedOptimizer(
        parameters(), torch.optim.AdamW, reduction=zero_opt.AlreadyReduced(), lr=1e-3, foreach=True
    )
    peer = ZeroRedundancyOptimizer(parameters(), torch.optim.AdamW, lr=1e-3, foreach=True)
    return {"zero_opt": ours, "ZeroRedundancyOptimizer": peer}


def fill_gradients(optimizer: torch.optim.Optimizer) -> None:
    """The same on every rank."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 1e-3)


def timed(call: Callable[[], Any]) -> float:
    """Seconds until the slower rank has returned from `call`."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def rank_main(rank: int, store: str, rounds: int, answer: Any) -> None:
    """One rank: its times, from rank 0."""
    warnings.simplefilter("ignore")  # the peer's own deprecations
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    contenders: dict[str, Any] = optimizers()
    times: Times = {f"{name}{part}": [] for name in contenders for part in ("", " state_dict")}
    for optimizer in contenders.values():
        fill_gradients(optimizer)
    for number in range(rounds):
        for name, optimizer in contenders.items():
            optimizer.step()
            times[name].append(timed(lambda o=optimizer: o.consolidate_state_dict(to=0)))
            times[f"{name} state_dict"].append(timed(lambda o=optimizer: o.state_dict() if rank == 0 else None))
            if rank == 0:
                print(f"round {number + 1}: {name} {times[name][-1]:.3f} s", file=sys.stderr, flush=True)
    if rank == 0:
        check_same_state(contenders)
        answer.send(times)
    dist.barrier()
    dist.destroy_process_group()


def check_same_state(contenders: dict[str, Any]) -> None:
    """Both must have brought the same number of bytes, or the times compare nothing."""
    sizes = set()
    for optimizer in contenders.values():
        states = optimizer.state_dict()["state"].values()
        sizes.add(sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor)))
    assert len(sizes) == 1, sizes


def measure(rounds: int) -> Times:
    """Fork the ranks and wait for what rank 0 says."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, f"{folder}/store", rounds, theirs))
            for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        try:
            times: Times = ours.recv()
        finally:
            for process in ranks:
                process.join(60)
    return times


def report(times: Times, rounds: int) -> str:
    """The result as markdown."""
    count = sum(p.numel() for p in parameters())
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
    return "\n".join([*lines, "", said])


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
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="also write the result to this folder")
    arguments = parser.parse_args()
    text = report(measure(arguments.rounds), arguments.rounds)
    print(text)
    if arguments.write:
        write_result(arguments.write, "consolidate", text)


if __name__ == "__main__":
    main()
