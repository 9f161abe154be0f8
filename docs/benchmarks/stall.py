"""How long a training loop stands still for the optimizer, by where and when the state in host memory is stepped.

    python docs/benchmarks/stall.py [--mi 32] [--rounds 3] [--leave-out selective] [--write docs/benchmarks/results/]

A backward multiplies matrices on one core for half as long again as a step takes on the other, and hands over a
parameter's gradient after each share of them, a module's; a forward, half as long, multiplies in each module.
Gradients are clipped to a norm that they do not reach. All run in turns, so that they meet the same machine; medians
count, of means over a window of four steps: selective policies do most of their work in one of them.

- *step()*: the call itself, the norm and the copy into the parameters included.
- *worker*: the part of it in which this process waits for the worker.
- *in hooks*: how long forwards wait for parameters, with overlap_param_gather; everything in the hooks counts.
- *stall*: step() and in hooks.
- *iteration*: forward, backward and step(), less the same forward and backward without an optimizer.
- *hidden*: how much less than with delay=0, of the waiting for the worker, and of the stall.

*FSDP2* rows have the same layers sharded by fully_shard, over a mesh of one rank; what is bare, and hidden, is of FSDP2
too. In the last table two ranks share the cores: forwards and backwards of both wait for as long as a core would
multiply, so that each rank's worker has one.

Parameters are written within step(), or, with overlap_param_gather, beside the forward: what it takes to copy as many
bytes is measured beside.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from support.machine import add_write, command, load, machine, publish, spread, today
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_opt
from zero_opt.placement.worker.process import WorkerProcess
from zero_opt.policies import CPUOffload, Selective, WorkerOffload
from zero_opt.sharding.background_gather import BackgroundGather

SCRIPT = "docs/benchmarks/stall.py"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PARAMS = 16
WIDTH = 1024  # columns of each
# What is reduced last is stepped when backward is over, whatever the offload: small buckets leave little of that.
BUCKET_MB = 4
# Never reached, so nothing is clipped; but it has to be known.
MAX_NORM = 1e9
IN_PROCESS = "in process"
SYNCHRONOUS = "worker, delay=0"
FSDP = "FSDP2"
OFFLOADS: dict[str, Any] = {
    IN_PROCESS: None,
    SYNCHRONOUS: WorkerOffload(),
    "worker, delay=1": WorkerOffload(delay=1),
    "worker, speculating": WorkerOffload(speculate=True),
    "worker, delay=0, overlap_param_gather": WorkerOffload(),
    "worker, speculating, overlap_param_gather": WorkerOffload(speculate=True),
    "in process, selective": CPUOffload(selective=Selective()),
    "worker, selective": WorkerOffload(selective=Selective()),
    "worker, delay=1, selective": WorkerOffload(delay=1, selective=Selective()),
}
BESIDE_FSDP = (SYNCHRONOUS, "worker, delay=1", "worker, speculating")
OFFLOADS |= {f"{FSDP}, {name}": OFFLOADS[name] for name in BESIDE_FSDP}
# Of two ranks.
PAIRED = (*BESIDE_FSDP, *(f"{FSDP}, {name}" for name in BESIDE_FSDP))
# Alone, to see how long a step takes on one core; a backward computes for so many times that long.
ONE_THREAD = {"worker, one thread": WorkerOffload(threads=1)}
SHARE = 1.5
OVERLAPPING = "overlap_param_gather"
WINDOW = 4  # steps, as Selective has it
WARM, STEPS = 4, 8  # of both, whole windows
COPIERS = (1, 2)


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


class Products(torch.autograd.Function):
    """Multiplies matrices, in the backward twice as often as in the forward; its gradient was made before."""

    side = torch.zeros(0)
    count = 0
    pause_ms = 0.0  # instead of multiplying once

    @staticmethod
    def multiply(times: int) -> None:
        """Compute, or wait."""
        if Products.pause_ms:
            time.sleep(times * Products.pause_ms / 1e3)
            return
        for _ in range(times):
            Products.side @ Products.side

    @staticmethod
    def forward(ctx: Any, _param: Tensor, grad: Tensor, before: Tensor) -> Tensor:
        """Compute, and hand on what keeps the layers in order."""
        ctx.grad = grad
        Products.multiply(Products.count)
        return before.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Compute, then hand over."""
        Products.multiply(2 * Products.count)
        return ctx.grad.clone(), None, grads[0]


class Layer(torch.nn.Module):
    """One matrix, whose gradient is always the same."""

    def __init__(self, values: Tensor, grad: Tensor) -> None:
        super().__init__()
        self.weight, self.grad = torch.nn.Parameter(values.clone()), grad

    def forward(self, before: Tensor) -> Tensor:
        """See :class:`Products`."""
        return Products.apply(self.weight, self.grad, before)


def is_fsdp(name: str | None) -> bool:
    """Whether FSDP2 shards the parameters of a contender."""
    return name is not None and name.startswith(FSDP)


class Trainer:
    """Layers whose backward computes, and an optimizer of their parameters, or none."""

    def __init__(self, numel: int, dtype: torch.dtype, name: str | None) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (PARAMS, numel // PARAMS // WIDTH, WIDTH)
        made = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        self.model = torch.nn.Sequential(*map(Layer, made[0], made[1]))
        if is_fsdp(name):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*self.model, self.model):
                fully_shard(module, mesh=mesh)
        self.params = list(self.model.parameters())
        self.name, self.optimizer = name, None
        if name == IN_PROCESS:
            self.optimizer = zero_opt.CPUAdamW(self.params, state=zero_opt.AdamState(master="float32"))
        elif name not in (None, FSDP):
            self.optimizer = zero_opt.ShardedOptimizer(
                self.params,
                torch.optim.AdamW,
                fused=True,
                reduction=zero_opt.Overlapped(
                    bucket_mb=BUCKET_MB, overlap_param_gather=self.model if OVERLAPPING in name else None
                ),
                offload={**OFFLOADS, **ONE_THREAD}[name],
                max_grad_norm=MAX_NORM,
            )

    def compute(self) -> None:
        """Forward and backward."""
        for param in self.params:
            param.grad = None
        self.model(torch.zeros((), requires_grad=True)).backward()

    def step(self) -> None:
        """As a training loop calls it."""
        if self.name is not None and self.name.startswith(IN_PROCESS):
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        if self.name == IN_PROCESS:
            torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        if self.optimizer is not None:
            self.optimizer.step()
        torch.set_num_threads(1)

    def close(self) -> None:
        """End the worker, and have all cores again."""
        if isinstance(self.optimizer, zero_opt.ShardedOptimizer):
            self.optimizer.flush()
            self.optimizer.close()


@contextmanager
def timing(owner: type, method: str, times: list[float]) -> Iterator[None]:
    """Collect how long calls of a method take, in ms."""
    call = getattr(owner, method)
    setattr(owner, method, lambda *arguments: times.append(timed(lambda: call(*arguments))))
    try:
        yield
    finally:
        setattr(owner, method, call)


class Times:
    """Of one contender, in ms per step."""

    def __init__(self) -> None:
        self.compute: list[float] = []
        self.step: list[float] = []
        self.waiting: list[float] = []
        self.hooks: list[float] = []
        self._window: list[tuple[float, ...]] = []

    def add(self, *step: float) -> None:
        """Forward and backward, step, waiting and hooks of one step; those of a window are kept as one."""
        self._window.append(step)
        if len(self._window) == WINDOW:
            for values, column in zip((self.compute, self.step, self.waiting, self.hooks), zip(*self._window)):
                values.append(statistics.fmean(column))
            self._window = []

    def stall(self) -> list[float]:
        """Step, and in hooks."""
        return [a + b for a, b in zip(self.step, self.hooks)]

    def iteration(self) -> list[float]:
        """Forward, backward and step."""
        return [a + b for a, b in zip(self.compute, self.step)]


def measure(numel: int, dtype: torch.dtype, name: str | None, found: Times) -> None:
    """A few steps."""
    trainer = Trainer(numel, dtype, name)
    waits: list[float] = []
    hooks: list[float] = []
    with timing(WorkerProcess, "_watch", waits), timing(BackgroundGather, "called", hooks):
        for number in range(WARM + STEPS):
            waits.clear()
            hooks.clear()
            compute = timed(trainer.compute)
            step = timed(trainer.step)
            if number >= WARM:
                found.add(compute, step, sum(waits), sum(hooks))
    trainer.close()
    del trainer
    gc.collect()  # modules of FSDP2 and their optimizers are cycles, of 256 MiB and more each


def calibrate(step_ms: float) -> None:
    """Let the backward of all layers together multiply for that long."""
    Products.side = torch.randn(256, 256)
    Products.count = 1
    for _ in range(3):
        once = timed(lambda: [Products.side @ Products.side for _ in range(20)]) / 20
    Products.count = max(1, round(step_ms / PARAMS / once / 2))


def copying(numel: int, dtype: torch.dtype, threads: int) -> list[float]:
    """Milliseconds for copying all parameters, by torch."""
    source = torch.ones(numel, dtype=dtype)
    target = torch.zeros_like(source)
    torch.set_num_threads(threads)
    times = [timed(lambda: target.copy_(source)) for _ in range(WARM + STEPS)]
    torch.set_num_threads(1)
    return times[WARM:]


def in_turns(numel: int, dtype: torch.dtype, found: Mapping[str | None, Times]) -> None:
    """One round."""
    for name, times in found.items():
        measure(numel, dtype, name, times)


def contend(
    arguments: argparse.Namespace, dtype: torch.dtype, copies: dict[int, list[float]]
) -> tuple[dict[str | None, Times], dict[str | None, Times]]:
    """Measure all contenders, and no optimizer, in turns: alone and as two ranks; and copies, by number of threads."""
    torch.set_num_threads(1)
    numel, left_out = arguments.mi << 20, arguments.leave_out
    Products.side, Products.count = torch.zeros(1, 1), 1
    alone = Times()
    measure(numel, dtype, "worker, one thread", alone)
    step_ms = SHARE * statistics.median(alone.waiting)
    calibrate(step_ms)
    names = [name for name in OFFLOADS if not (left_out and left_out in name)]
    found: dict[str | None, Times] = {name: Times() for name in (None, FSDP, *names)}
    for _ in range(arguments.rounds):
        in_turns(numel, dtype, found)
        for threads in COPIERS:
            copies.setdefault(threads, []).extend(copying(numel, dtype, threads))
    return found, two_ranks(numel, dtype, arguments.rounds, step_ms)


def one_of_two(rank: int, numel: int, dtype: torch.dtype, rounds: int, step_ms: float, store: str, pipe: Any) -> None:
    """One rank; the first one sends what it has found."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    Products.count, Products.pause_ms = 1, step_ms / PARAMS / 2
    found: dict[str | None, Times] = {name: Times() for name in (None, FSDP, *PAIRED)}
    for _ in range(rounds):
        in_turns(numel, dtype, found)
    dist.barrier()
    if rank == 0:
        pipe.send(found)
    dist.destroy_process_group()


def two_ranks(numel: int, dtype: torch.dtype, rounds: int, step_ms: float) -> dict[str | None, Times]:
    """Two ranks, which wait instead of computing."""
    fresh = multiprocessing.get_context("spawn")
    here, there = fresh.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        given = (numel, dtype, rounds, step_ms, f"{folder}/store", there)
        ranks = [fresh.Process(target=one_of_two, args=(rank, *given)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        there.close()
        found: dict[str | None, Times] = here.recv()
        for rank in ranks:
            rank.join()
    return found


def hidden(times: Sequence[float], of: Sequence[float]) -> str:
    """How much less they are, the median over windows of the same round."""
    return f"{100 * (1 - statistics.median(map(float.__truediv__, times, of))):.0f} %"


def table(dtype: str, found: dict[str | None, Times], copies: dict[int, list[float]]) -> Iterator[str]:
    """Markdown of one dtype."""
    median = statistics.median
    bare = {name: found[name].iteration() for name in (None, FSDP)}
    yield (
        f"| {dtype} | `step()`, ms | of it for the worker, ms | in hooks, ms "
        f"| iteration over a bare one of {median(bare[None]):.0f} ms, with FSDP2 {median(bare[FSDP]):.0f} ms, ms "
        "| waiting hidden | stall hidden |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, times in found.items():
        if name in (None, FSDP):
            continue
        more = list(map(float.__sub__, times.iteration(), bare[FSDP if is_fsdp(name) else None]))
        synchronous = found[f"{FSDP}, {SYNCHRONOUS}" if is_fsdp(name) else SYNCHRONOUS]
        waiting, hooks, of_waiting, of_stall = "", "", "", ""
        if name != IN_PROCESS:
            waiting, of_waiting = spread(times.waiting, 1), hidden(times.waiting, synchronous.waiting)
            of_stall = hidden(times.stall(), synchronous.stall())
        if OVERLAPPING in name:
            hooks = spread(times.hooks, 1)
        cells = (name, spread(times.step, 1), waiting, hooks, spread(more, 1), of_waiting, of_stall)
        yield f"| {' | '.join(cells)} |"
    for threads, taken in copies.items():
        yield f"| a copy of the parameters by torch, threads: {threads} | {spread(taken, 1)} |  |  |  |  |  |"
    yield ""


def report(arguments: argparse.Namespace) -> str:
    """The result as markdown."""
    lines = [
        f"### Standing still for the step, {today()}",
        "",
        f"`{command(SCRIPT)}`",
        "",
        f"{machine()}; {load()}.",
        "",
        f"{arguments.mi} Mi elements in {PARAMS} matrices, buckets of {BUCKET_MB} MiB. *Hidden* is of delay=0, which",
        "steps with both cores while backward does not run; the others leave one to this process. Selective policies",
        "add up gradients and move columns in step() itself, here with one core but in process.",
        "",
    ]
    for name, dtype in DTYPES.items():
        copies: dict[int, list[float]] = {}
        alone, paired = contend(arguments, dtype, copies)
        lines += [*table(name, alone, copies), *table(f"{name}, two ranks", paired, {})]
    return "\n".join(lines).rstrip()


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mi", type=int, default=32, help="elements, in Mi")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--leave-out", metavar="WORD", help="contenders whose names have it")
    add_write(parser)
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this needs two cores: one for the worker")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    text = report(arguments)
    publish(arguments.write, "stall", text)


if __name__ == "__main__":
    main()
