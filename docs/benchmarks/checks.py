"""What the checks of every training step cost, on two gloo ranks and a 33.6 M-parameter model.

    python docs/benchmarks/checks.py [--write docs/benchmarks/results/]

Two forked ranks, one thread each, train the same transformer twice, with `Checks(nonfinite="ignore")` and `"skip"`.
Steps alternate between the two, so that both meet the same machine; a time is that of the slower rank. What the
checks of a step do takes less than the noise of single steps, so it is timed by itself too, between the steps: the
whole agreement (a message that also says how many buckets to exchange, which no step could do without), the part of
it that is masks and digests, the look for non-finite gradients, and the reduction of all gradients with and without
the squares that the look needs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.forked import forked, timed
from support.machine import add_write, command, load, machine, publish, spread, today
from support.model import Batch, make_data, make_model

import zero_opt
from zero_opt.comm.exchange import BucketReduction, Ident
from zero_opt.reduction import OwnRounds
from zero_opt.reduction.grad_norm import alone, share_of

WORLD_SIZE, BATCH = 2, Batch(tokens=128)
Times = dict[str, list[float]]
STEP, SKIP, AGREE, LOCAL, LOOK, WHOLE_LOOK, REDUCE, SQUARES = (
    "training step, nonfinite ignored",
    "training step, nonfinite skipped",
    "agreement: masks, digest, message, compare",
    "of it on this rank alone",
    "look for non-finite gradients, squares added up before",
    "look for non-finite gradients, if nothing were",
    "reduction of all gradients",
    "the same, squares added up meanwhile",
)


def train_backward(net: torch.nn.Module, optimizer: Any, batch: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """A step but for ``step()``."""

    def run() -> None:
        optimizer.zero_grad()
        net(*batch).backward()

    return run


def train_step(backward: Callable[[], None], optimizer: Any) -> Callable[[], None]:
    """One whole step."""

    def run() -> None:
        backward()
        optimizer.step()

    return run


def checks_alone(optimizer: Any, times: Times) -> None:
    """What a step does beside training, by itself."""
    engine, nothing = optimizer._engine, OwnRounds(0, None)
    times[AGREE].append(timed(partial(engine.agree, nothing, None, None, absent=False)))
    times[LOCAL].append(timed(partial(engine.step_report, nothing, {})))


def look_alone(optimizer: Any, backward: Callable[[], None], times: Times) -> None:
    """What the look for non-finite gradients does at ``step()``, with and without squares from the reduction."""
    sharded = optimizer._engine
    backward()
    sharded.reduce()
    buckets = sharded.partition.buckets
    grads = [grad for bucket in buckets for grad in bucket.slice_grads()]
    known = [sums for bucket in buckets for sums in bucket.squares()]
    assert all(sums is not None for sums in known), "added up from the second step on"
    times[LOOK].append(timed(lambda: alone(share_of(grads, range(len(grads)), optimizer._group, known))))
    times[WHOLE_LOOK].append(timed(lambda: alone(share_of(grads, range(len(grads)), optimizer._group))))


def reductions_alone(optimizer: Any, number: int, times: Times) -> None:
    """The exchange of all gradients by itself; parameters serve as gradients."""
    sharded = optimizer._engine
    count, buckets = sharded.count, sharded.partition.buckets
    runs = [bucket.param_runs() for bucket in buckets]
    outs = [torch.empty_like(bucket.shard) for bucket in buckets]
    sums = [bucket.reader.sums(bucket) for bucket in buckets]
    assert all(sums), "on this machine the exchange adds up"

    def reduce(turn: int, *, adds_up: bool) -> None:
        for at, bucket in enumerate(buckets):
            ident = Ident(count.step, count.epoch, 1000 + turn * len(buckets) + at)
            exchange = sharded.reduction._parts.exchange_of(bucket)
            wanted = sums[at] if adds_up else ()
            exchange.reduce_runs(BucketReduction(ident, runs[at], bucket.layout.bounds, outs[at], wanted))

    reduce(0, adds_up=False)
    for turn in (1, 2):
        adds_up = (turn + number) % 2 == 0
        times[SQUARES if adds_up else REDUCE].append(timed(partial(reduce, turn, adds_up=adds_up)))


def measured(rank: int, _: int, rounds: int) -> Times:
    """Return the times of the slower rank."""
    (batch,) = make_data(rank, 1, BATCH)
    backwards, steps, optimizers = {}, {}, {}
    for name, nonfinite in ((STEP, "ignore"), (SKIP, "skip")):
        net = make_model(BATCH.tokens)
        optimizers[name] = zero_opt.ShardedOptimizer(
            net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, checks=zero_opt.Checks(nonfinite=nonfinite)
        )
        backwards[name] = train_backward(net, optimizers[name], batch)
        steps[name] = train_step(backwards[name], optimizers[name])
    times: Times = {name: [] for name in (STEP, SKIP, AGREE, LOCAL, LOOK, WHOLE_LOOK, REDUCE, SQUARES)}
    for number in range(rounds + 2):
        for name in (STEP, SKIP) if number % 2 else (SKIP, STEP):
            seconds = timed(steps[name])
            if number >= 2:  # the first two find out the order of buckets, and touch memory
                times[name].append(seconds)
        if number >= 2:
            checks_alone(optimizers[STEP], times)
            look_alone(optimizers[SKIP], backwards[SKIP], times)
            reductions_alone(optimizers[SKIP], number, times)
    for optimizer in optimizers.values():
        optimizer.close()
    return times


def report(times: Times) -> str:
    """The result as Markdown."""
    step = statistics.median(times[STEP])
    lines = [
        f"### Checks of a training step, {today()}",
        "",
        f"`{command('docs/benchmarks/checks.py')}`",
        "",
        f"{machine()}; {load()}.",
        "",
        f"{WORLD_SIZE} gloo ranks with one thread each, {len(times[STEP])} interleaved rounds.",
        "",
        "| ms, median (least - most) of the slower rank | | of a step |",
        "| --- | --- | --- |",
    ]
    for name, seconds in times.items():
        share = 100 * statistics.median(seconds) / step
        lines.append(f"| {name} | {spread([1e3 * second for second in seconds])} | {share:.2f} % |")
    squares = statistics.median(b - a for a, b in zip(times[REDUCE], times[SQUARES], strict=True))
    both = statistics.median(times[LOOK]) + squares
    lines += [
        "",
        f"Adding up takes {1e3 * squares:.3f} ms of the reduction (median of differences of a round). With the look at "
        f"`step()` that is {100 * both / step:.2f} % of a step, and with the agreement "
        f"{100 * (both + statistics.median(times[AGREE])) / step:.2f} %.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print; write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    add_write(parser)
    arguments = parser.parse_args()
    text = report(forked(measured, WORLD_SIZE, arguments.rounds)[0])
    publish(arguments.write, "checks", text)


if __name__ == "__main__":
    main()
