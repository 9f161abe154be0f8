"""A whole offloaded step beside that of others: bf16 gradients, clipping, Adam on fp32 masters, bf16 parameters.

    python docs/benchmarks/offload.py [--width 1024] [--layers 4] [--ranks 1 2] [--rounds 9] [--write FOLDER]

All systems train the same parameters (a transformer's shapes) in the same processes, in turns, so that each round of
all of them meets the same machine; medians over rounds, of each the slowest rank. Forward and backward are next to
nothing, with the same gradients in every system. Without a GPU everything is on the CPU, in one rank with all cores or
several that share them.

- *backward* is all that happens in it: DeepSpeed casts gradients, takes their norm and reduces them there.
- *step* is ``step()`` and the dropping of gradients.
- *exposed* is how much longer backward and step take than autograd alone: all that a training loop waits for, from the
  gradient of a parameter to the parameter.
- *a step's bytes* are what any Adam on this state has to read and write once, with nothing computed.
- *peak* is device memory, of a process that runs this system alone; there is none on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer would import it, on every rank
import torch.distributed as dist
from support.machine import add_write, command, load, machine, publish, spread, today
from support.systems import Trainer, deepspeed_offload_engine, trainer
from torch import Tensor, nn

import zero_opt

SCRIPT = "docs/benchmarks/offload.py"
HYPERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MAX_NORM, WARMUP, TARGET = 1.0, 3, 0.35
DEEPSPEED, TORCHAO, ALONE = "DeepSpeed ZeRO-2, offload to CPU", "torchao CPUOffloadOptimizer", "autograd alone"
MOVING = "a step's bytes alone, moved"
COMPACT = ", 8-bit moments, split masters"  # in place of fp32 ones
LIMIT_S = 900.0
# Between systems, at the default size or below, and in proportion above: a delayed step has ended by then, and takes no
# core from the next system.
REST_S = 0.25
Times = dict[str, dict[str, list[float]]]


class Shapes(nn.Module):
    """Parameters of a transformer's shapes, and fixed directions that are their gradients."""

    def __init__(self, width: int, layers: int, device: str) -> None:
        super().__init__()
        block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *[(width,)] * 4]
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator).mul_(0.02).bfloat16().to(device) for shape in block * layers]
        self.held = nn.ParameterList(nn.Parameter(values) for values in drawn)
        self.directions = [values.flip(0).contiguous() for values in drawn]

    def forward(self) -> Tensor:
        """A loss."""
        pairs = zip(self.held, self.directions, strict=True)
        return torch.stack([torch.dot(param.flatten(), values.flatten()) for param, values in pairs]).sum()


def ours(offload: Any, state: zero_opt.AdamState | None = None) -> Callable[[Shapes], Trainer]:
    """Over the default reduction; with fp32 state unless another form is given."""
    named: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, {"fused": True})
    if state is not None:
        named = zero_opt.CPUAdamW, {"state": state}

    def build(model: Shapes) -> Trainer:
        kind, options = named
        return trainer(
            model,
            zero_opt.ShardedOptimizer(
                model.parameters(), kind, offload=offload, max_grad_norm=MAX_NORM, **options, **HYPERS
            ),
        )

    return build


def alone(model: Shapes) -> Trainer:
    """No step."""
    return Trainer(model, Tensor.backward, model.zero_grad)


def moving(model: Shapes) -> Trainer:
    """In place of a step, as many bytes read and written as its kernel has to: gradient, fp32 state, parameter."""
    numel = sum(param.numel() for param in model.parameters()) // dist.get_world_size()
    grad, out = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
    state = [torch.zeros(numel) for _ in range(3)]

    def step() -> None:
        for tensor in state:
            tensor.neg_()
        torch.neg(grad, out=out)
        model.zero_grad()

    return Trainer(model, Tensor.backward, step)


def deepspeed_offload(model: Shapes) -> Trainer:
    """Its own engine, with its own Adam."""
    engine = deepspeed_offload_engine(model, model.parameters(), MAX_NORM, **HYPERS)
    return Trainer(engine, engine.backward, engine.step)


def torchao_offload(model: Shapes) -> Trainer:
    """Gradients stay in host memory with the state; it does not clip."""
    from torchao.optim import CPUOffloadOptimizer

    return trainer(model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **HYPERS))


SYSTEMS: dict[str, Callable[[Shapes], Trainer]] = {
    ALONE: alone,
    MOVING: moving,
    DEEPSPEED: deepspeed_offload,
    TORCHAO: torchao_offload,
    "CPUOffload()": ours(zero_opt.CPUOffload()),
    "WorkerOffload()": ours(zero_opt.WorkerOffload()),
    "WorkerOffload(delay=1)": ours(zero_opt.WorkerOffload(delay=1)),
    "CPUOffload()" + COMPACT: ours(zero_opt.CPUOffload(), zero_opt.AdamState("block8", "split")),
    "WorkerOffload()" + COMPACT: ours(zero_opt.WorkerOffload(), zero_opt.AdamState("block8", "split")),
}


def missing(world_size: int) -> dict[str, str]:
    """Systems that cannot run here, and why."""
    found = {}
    if importlib.util.find_spec("deepspeed") is None:
        found[DEEPSPEED] = "deepspeed is not installed"
    if importlib.util.find_spec("torchao") is None:
        found[TORCHAO] = "torchao is not installed"
    elif not torch.cuda.is_available():
        found[TORCHAO] = "it is for CUDA alone"
    elif world_size > 1:
        found[TORCHAO] = "it is for one rank"
    return found


@dataclass(frozen=True)
class Case:
    """What to run."""

    systems: Sequence[str]
    world_size: int
    width: int
    layers: int
    rounds: int
    device: str

    def ended(self) -> float:
        """Now, once the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def measured(self) -> tuple[Times, int]:
        """ms per system of backward and step, round by round; and the peak of device memory."""
        trainers = {name: SYSTEMS[name](Shapes(self.width, self.layers, self.device)) for name in self.systems}
        times: Times = {name: {"backward": [], "step": []} for name in self.systems}
        rest_s = REST_S * max(1.0, (self.width / 1024) ** 2 * self.layers / 4)
        for number in range(WARMUP + self.rounds):
            for name, system in trainers.items():
                dist.barrier()
                loss = system.forward()
                marks = [self.ended()]
                system.backward(loss)
                marks.append(self.ended())
                system.step()
                marks.append(self.ended())
                time.sleep(rest_s)
                if number >= WARMUP:
                    times[name]["backward"].append(1e3 * (marks[1] - marks[0]))
                    times[name]["step"].append(1e3 * (marks[2] - marks[1]))
        return times, torch.cuda.max_memory_allocated() if self.device == "cuda" else 0


def rank_main(case: Case, rank: int, store: str, answer: Connection) -> None:
    """One rank: sends what it measured, or a traceback."""
    warnings.simplefilter("ignore")  # the peers' own deprecations
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // case.world_size, 1))
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(case.world_size), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if case.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    backend = "nccl" if case.device == "cuda" and case.world_size == 1 else "gloo"  # NCCL does not share a device
    try:
        shared = dist.FileStore(store, case.world_size)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=case.world_size)
        answer.send(case.measured())
        dist.barrier()
    except BaseException:
        answer.send(traceback.format_exc())
    os._exit(0)  # what others leave running is none of ours


def execute(case: Case) -> tuple[Times, int]:
    """Fresh ranks for a case: of every round the slowest rank, and the highest peak.

    Raises:
        RuntimeError: a rank failed; the message is its traceback.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(case.world_size)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(case, rank, f"{folder}/store", pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        found = [pipe[0].recv() if pipe[0].poll(LIMIT_S) else "no answer in time" for pipe in pipes]
        for process in ranks:
            process.join(10)
            process.kill()
            process.join(10)
    for answer in found:
        if isinstance(answer, str):
            raise RuntimeError(answer)
    slowest: Times = {
        name: {part: list(map(max, zip(*(times[name][part] for times, _ in found)))) for part in ("backward", "step")}
        for name in case.systems
    }
    return slowest, max(peak for _, peak in found)


def section(case: Case) -> list[str]:
    """A table of all systems that can run with so many ranks, and the figure that is asked for."""
    left_out = missing(case.world_size)
    systems = [name for name in SYSTEMS if name not in left_out]
    times, _ = execute(Case(systems, case.world_size, case.width, case.layers, case.rounds, case.device))
    numel = sum(param.numel() for param in Shapes(case.width, case.layers, "cpu").parameters())
    lines = [
        f"**{case.world_size} rank{'s' * (case.world_size > 1)}**, {numel / 1e6:.1f} M parameters on {case.device}, ms",
        "",
        "| | backward | step | of DeepSpeed's | exposed | of DeepSpeed's | peak, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    waits = {name: list(map(float.__sub__, totals(times[name]), totals(times[ALONE]))) for name in systems}
    steps = {name: times[name]["step"] for name in systems}
    for name in systems:
        compared = DEEPSPEED in times and name != ALONE
        beside = [f"{ratio(kind, name):.2f}" if compared else "" for kind in (steps, waits)]
        peak = "-"
        if case.device == "cuda":
            peak = f"{execute(Case([name], case.world_size, case.width, case.layers, 3, 'cuda'))[1] / 2**20:,.0f}"
        exposed = f"{statistics.median(waits[name]):.1f}"
        cells = (spread(times[name]["backward"], 1), spread(steps[name], 1), beside[0], exposed, beside[1], peak)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *(f"- {name}: left out, {reason}." for name, reason in left_out.items())]
    for name in ("CPUOffload()", "WorkerOffload()"):
        found = [f"{ratio(kind, name + COMPACT, name):.2f}" for kind in (steps, waits)]
        lines.append(
            f"- `{name}`{COMPACT}: `step()` takes {found[0]} of that with fp32 state, all that is exposed {found[1]}."
        )
    if DEEPSPEED in times:
        found = [f"{ratio(kind, 'CPUOffload()'):.2f}" for kind in (waits, steps)]
        lines.append(
            f"- `CPUOffload()`: the whole way from gradient to parameter takes {found[0]} of DeepSpeed's; at most "
            f"{TARGET} was the aim. Of the bare call of `step()`, which leaves out what DeepSpeed does in backward, "
            f"{found[1]}; no step can take less than its bytes, {ratio(steps, MOVING):.2f}."
        )
    return [*lines, ""]


def totals(times: dict[str, list[float]]) -> list[float]:
    """Backward and step, round by round."""
    return list(map(float.__add__, times["backward"], times["step"]))


def ratio(times: dict[str, list[float]], name: str, other: str = DEEPSPEED) -> float:
    """A system's times beside another's, the median over rounds."""
    return statistics.median(map(float.__truediv__, times[name], times[other]))


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    add_write(parser)
    given = parser.parse_args()
    # DeepSpeed compiles its kernel with a ninja that may be installed beside the interpreter alone.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask the driver would spoil it for forks
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = [f"### An offloaded step, {today()}", "", f"`{command(SCRIPT)}`", "", f"{machine()}; {load()}.", ""]
    for world_size in given.ranks:
        lines += section(Case((), world_size, given.width, given.layers, given.rounds, device))
    text = "\n".join(lines)
    publish(given.write, "offload", text)


if __name__ == "__main__":
    main()
