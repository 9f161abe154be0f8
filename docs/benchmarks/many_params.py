"""What each parameter costs when a model has many small ones: a training step, and the optimizer's state dict.

    python docs/benchmarks/many_params.py [--rounds 15] [--write docs/benchmarks/results/]

Two forked gloo ranks, one thread each, train the same model in each system, in turn; a step is forward, backward,
``step()`` and ``zero_grad()``, and starts on both ranks together. A time is that of the slower rank; medians count. The
overhead is the step's time without that of the bare model, which each rank trains by itself, divided by the number of
parameters. Every optimizer is AdamW with ``fused=True``; DDP has ``gradient_as_bucket_view=True``. Last, ``step()``
alone, of a model of which each parameter is a param group of its own, with its own learning rate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.forked import forked, in_turn, timed
from support.machine import add_write, command, load, machine, publish, say, spread, today
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zero_opt

WORLD_SIZE = 2
GROUPS = (1_000, 1_000)  # how many param groups, of how many elements
CASES = ((1_000, 1_000), (4_000, 250), (10_000, 100))
BARE = "the model alone"
ADAMW = partial(torch.optim.AdamW, fused=True)


class Product(nn.Module):
    """The product of all parameters, element by element."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.factors = nn.ParameterList(
            nn.Parameter(1 + 1e-3 * torch.randn(numel, generator=generator)) for _ in range(count)
        )

    def forward(self, product: Tensor) -> Tensor:
        for factor in self.factors:
            product = product * factor
        return product.sum()


def ours(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    """zero_opt, with a reduction."""
    return model, zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **options)


def bare(model: nn.Module) -> tuple[nn.Module, Any]:
    """No other rank."""
    return model, ADAMW(model.parameters())


def ddp(model: nn.Module) -> tuple[nn.Module, Any]:
    """DDP and AdamW."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ADAMW(wrapped.parameters())


def ddp_zero(model: nn.Module) -> tuple[nn.Module, Any]:
    """DDP and ZeroRedundancyOptimizer."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, fused=True)


SYSTEMS: dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]] = {
    BARE: bare,
    "zero_opt": ours,
    "zero_opt, AtStep": partial(ours, reduction=zero_opt.AtStep()),
    "DDP": ddp,
    "DDP + ZeroRedundancyOptimizer": ddp_zero,
}


def train_step(model: nn.Module, optimizer: Any, data: Tensor) -> None:
    """Train one step."""
    model(data).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_times(made: dict[str, tuple[nn.Module, Any]], data: Tensor, rank: int, rounds: int) -> dict[str, list[float]]:
    """The full state on rank 0, and back."""
    (model, sharded), (wrapped, peer) = made["zero_opt"], made["DDP + ZeroRedundancyOptimizer"]
    full: list[Any] = [None]

    def alone() -> None:
        full[0] = sharded.state_dict() if rank == 0 else None

    def of_peer() -> None:
        peer.consolidate_state_dict(to=0)
        full[0] = peer.state_dict() if rank == 0 else None

    calls: dict[str, Callable[[], Any]] = {
        "state_dict() on rank 0 alone": alone,
        "consolidate_state_dict()": sharded.consolidate_state_dict,
        "state_dict() after it": alone,
        "ZeroRedundancyOptimizer: consolidate, state_dict()": of_peer,
    }
    times: dict[str, list[float]] = {name: [] for name in [*calls, "load_state_dict()"]}
    for _ in range(rounds):
        train_step(model, sharded, data)
        train_step(wrapped, peer, data)
        for name, call in calls.items():
            times[name].append(timed(call))
        alone()
        dist.broadcast_object_list(full, src=0)
        times["load_state_dict()"].append(timed(lambda: sharded.load_state_dict(full[0])))
    return times


Times = dict[str, list[float]]


def measured(rank: int, _: int, case: tuple[int, int], rounds: int) -> tuple[Times, Times]:
    """Return the seconds of steps by system, and of what is done with the state."""
    made, data = {name: build(Product(*case)) for name, build in SYSTEMS.items()}, torch.ones(case[1])
    steps: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(rounds + 3):
        for name, (model, optimizer) in in_turn(made, turn):
            seconds = timed(partial(train_step, model, optimizer, data))
            if turn >= 3:
                steps[name].append(seconds)
    states = state_times(made, data, rank, max(3, rounds // 5))
    for _, optimizer in made.values():
        getattr(optimizer, "close", lambda: None)()
    return steps, states


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """A param group per parameter."""
    return [{"params": [param], "lr": 1e-3 * (1 + i / 1_000)} for i, param in enumerate(model.parameters())]


def grouped(_: int, __: int, case: tuple[int, int], rounds: int) -> Times:
    """Return the seconds of ``step()`` over many param groups, by system."""
    plain, model, data = Product(*case), Product(*case), torch.ones(case[1])
    sharded = zero_opt.ShardedOptimizer(groups_of(model), torch.optim.AdamW, fused=True)
    made: dict[str, tuple[nn.Module, Any]] = {BARE: (plain, ADAMW(groups_of(plain))), "zero_opt": (model, sharded)}
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(rounds + 3):
        for name, (trained, optimizer) in in_turn(made, turn):
            trained(data).backward()
            seconds = timed(optimizer.step)
            optimizer.zero_grad()
            if turn >= 3:
                times[name].append(seconds)
    sharded.close()
    return times


def section(case: tuple[int, int], rounds: int) -> list[str]:
    """The tables of one case."""
    count, numel = case
    steps, states = forked(measured, WORLD_SIZE, case, rounds)[0]
    lines = [f"**{count:,} parameters of {numel:,} elements**", ""]
    lines += ["| system | step, ms | overhead per parameter, us |", "| --- | ---: | ---: |"]
    for name, values in steps.items():
        over = statistics.median(a - b for a, b in zip(values, steps[BARE], strict=True)) / count
        lines.append(f"| {name} | {spread([1e3 * value for value in values], 1)} | {1e6 * over:.1f} |")
    lines += ["", "| state | s |", "| --- | ---: |"]
    lines += [f"| {name} | {spread(values)} |" for name, values in states.items()]
    return [*lines, ""]


def groups_section(rounds: int) -> list[str]:
    """The table of param groups."""
    count, numel = GROUPS
    times = forked(grouped, WORLD_SIZE, GROUPS, rounds)[0]
    lines = [f"**{count:,} param groups of one parameter of {numel:,} elements**", ""]
    lines += ["| system | `step()`, ms | beside the model alone |", "| --- | ---: | ---: |"]
    for name, values in times.items():
        beside = statistics.median(a / b for a, b in zip(values, times[BARE], strict=True))
        lines.append(f"| {name} | {spread([1e3 * value for value in values], 1)} | {beside:.2f} |")
    return [*lines, ""]


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    add_write(parser)
    arguments = parser.parse_args()
    lines = [f"### Many parameters, {today()}", "", f"`{command('docs/benchmarks/many_params.py')}`", ""]
    lines += [f"{machine()}; {load()}. {WORLD_SIZE} ranks, one thread each, {arguments.rounds} rounds.", ""]
    for case in CASES:
        lines += section(case, arguments.rounds)
        say(f"{case} done")
    lines += groups_section(arguments.rounds)
    text = "\n".join(lines)
    publish(arguments.write, "many_params", text)


if __name__ == "__main__":
    main()
