"""What a worker process costs: to start it, and to step through its redo log. What it hides is measured by stall.py.

    python docs/benchmarks/worker.py [--mi 64] [--rounds 7] [--write docs/benchmarks/results/]

Everything that is compared runs in turns in one process, so that both meet the same machine; medians count.

- *Starting* a worker, the memory it has of its own, and a step of nothing.
- *The redo log*: one step of the native kernel in place; through the log, in this process and in the worker; and in
  place with every result stored twice, which is the least that a redo log can cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from support.machine import add_write, command, load, machine, publish, spread, today
from support.stored_twice import stored_twice
from torch import Tensor

from zero_opt import _native
from zero_opt.placement.worker.process import WorkerProcess
from zero_opt.policies import WorkerOffload

SCRIPT = "docs/benchmarks/worker.py"
HYPERS = _native.Hypers(
    "adam", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False
)
GAP_BYTES = 8192  # arrays at distances of a power of two compete for one bank of memory
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def cores() -> tuple[int, ...]:
    """Those this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def private_mb(pid: int) -> float:
    """Return the private memory of a process, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1e3


def starting(rounds: int) -> dict[str, str]:
    """Time to be ready, memory, and a step of nothing."""
    ready, steps = [], []
    for _ in range(rounds):
        worker = WorkerProcess(WorkerOffload(), cores(), len(cores()))
        ready.append(timed(worker.start))
        memory = private_mb(worker._handles.child.pid)  # type: ignore[union-attr]
        steps += [timed(lambda: worker.wait(worker.submit([]))) * 1e3 for _ in range(200)]  # noqa: B023
        worker.close()
    return {
        "ready after, ms": spread(ready, 1),
        "memory of its own, MB": f"{memory:.1f}",
        "submit and wait for nothing, us": spread(steps, 0),
    }


class Arrays:
    """One step's arrays in an arena, as a worker has them: fp32, or a bf16 gradient and out."""

    def __init__(self, numel: int, dtype: torch.dtype, threads: int) -> None:
        self.threads = threads
        self.worker = WorkerProcess(WorkerOffload(), cores(), threads)
        half = dtype is not torch.float32
        kinds = {"param": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32, "grad": dtype}
        kinds.update({"out": dtype} if half else {})
        sizes = {role: numel * kind.itemsize + GAP_BYTES for role, kind in kinds.items()}
        at = self.worker.extend(sum(sizes.values()))
        self.tensors: dict[str, Tensor] = {}
        for role, kind in kinds.items():
            self.tensors[role] = self.worker.arena.view(at, numel, kind)
            at += sizes[role]
        generator = torch.Generator().manual_seed(0)
        self.tensors["param"].normal_(generator=generator)
        self.tensors["grad"].copy_(torch.randn(numel, generator=generator))
        name = str(dtype).removeprefix("torch.")
        addresses = {role: tensor.data_ptr() for role, tensor in self.tensors.items() if role != "grad"}
        self.run = _native.UpdateRun(
            numel, addresses, grad_dtype=name, out_dtype=name if half else "float32", step=10.0
        )
        self.batches = [(HYPERS, [self.run], [self.tensors["grad"].data_ptr()])]

    def plain(self) -> None:
        """In place, in this process."""
        _native.update_step(self.batches, threads=self.threads)

    def logged(self) -> None:
        """Through the redo log, in this process, by the function that the worker calls."""
        control = self.worker.control
        control.submit(self.batches, self.worker._handles.wake)
        control.finish(self.threads)

    def worked(self) -> None:
        """By the worker."""
        self.worker.wait(self.worker.submit(self.batches))


def redo_log(numel: int, rounds: int) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """(format, path, times in ms, times in place): every step ran just after the one in place of the same index."""
    twice = stored_twice(len(cores()))
    for name, dtype in DTYPES.items():
        arrays = Arrays(numel, dtype, len(cores()))
        paths = {"in place, stored twice": partial(twice, arrays.tensors)} if twice else {}
        for path, call in {**paths, "through the log": arrays.logged, "in the worker": arrays.worked}.items():
            if path == "in the worker":
                arrays.worker.start()
            times = [(timed(arrays.plain), timed(call)) for _ in range(rounds + 1)]
            plain, found = map(list, zip(*times[1:], strict=True))
            yield name, path, found, plain
        arrays.worker.close()


def report(arguments: argparse.Namespace) -> str:
    """The result as markdown."""
    numel, rounds = arguments.mi << 20, arguments.rounds
    median = statistics.median
    lines = [
        f"### Stepping in a worker process, {today()}",
        "",
        f"`{command(SCRIPT)}`",
        "",
        f"{machine()}; {load()}.",
        "",
    ]
    lines += ["| a worker | median (least - most) |", "| --- | ---: |"]
    lines += [f"| {name} | {value} |" for name, value in starting(3).items()]
    head = f"{arguments.mi} Mi elements, {len(cores())} threads"
    lines += ["", f"| one native step, {head} | ms, median (least - most) | just before, in place | over in place |"]
    lines += ["| --- | ---: | ---: | ---: |"]
    for name, path, times, plain in redo_log(numel, rounds):
        ratio = median(a / b for a, b in zip(times, plain))
        lines.append(f"| {name}, {path} | {spread(times, 1)} | {spread(plain, 1)} | {100 * (ratio - 1):+.1f} % |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mi", type=int, default=64, help="elements, in Mi")
    parser.add_argument("--rounds", type=int, default=7)
    add_write(parser)
    arguments = parser.parse_args()
    if len(cores()) < 2:
        sys.exit("this needs two cores: one for the worker")
    text = report(arguments)
    publish(arguments.write, "worker", text)


if __name__ == "__main__":
    main()
