"""One training step between hosts: zero_opt beside DDP and ZeroRedundancyOptimizer, over a network of 1 Gbit/s.

    python docs/benchmarks/hosts.py [--layouts 2x1 2x2] [--bucket-mb 25] [--rounds 5] [--draw] [--write]

Hosts are namespaces of this machine, and a switch between them has the rate and the delay (test/hosts/network.py): this
needs root, and the ranks of all hosts share the cores of this machine. Layout 2x1 is two hosts with one rank each.

Each round runs every system in turn, in an order that changes from round to round, on freshly forked gloo ranks with
one thread each; all train the same model on the same data and must end at the same loss. A system's time is the median
over rounds of its ranks' medians over steps; ratios are taken within a round. Bytes are what the kernel counts on the
interface of the host to the others, with packet headers; the least that must be sent is 2 (H-1)/H of the parameters, of
H hosts.

DDP has ``gradient_as_bucket_view=True``, and buckets of its default size. One row has its ``fp16_compress_hook``, for
comparison with bf16 between hosts: over gloo, DDP refuses its hook for bf16. Every optimizer is AdamW with
``fused=True``. "the model alone" is forward, backward and step of independent ranks; "the wire alone" sends the least
that must be sent, in one message per peer, and computes nothing. --draw adds what host 0 sends and receives over time
in one step of the last round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.machine import add_write, command, load, machine, publish, say, spread, today
from support.model import LAYERS, VOCABULARY, WIDTH, Batch, LanguageModel, make_model
from support.ranks import Outcome, Run, execute
from support.report import same_loss
from support.systems import HYPERS, System, Trainer, ddp_adamw, trainer, zero_redundancy
from support.wire import Wire, bars
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import zero_opt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # before the standard library, which has a "test" too
from test.hosts.network import INTERFACE, Network, Unavailable

SCRIPT = "docs/benchmarks/hosts.py"
ALONE, DDP = "the model alone", "DDP"
COLUMNS = 100  # of the drawing, for the longest step


def alone(model: LanguageModel, _: Batch) -> Trainer:
    """No other rank."""
    return trainer(model, torch.optim.AdamW(model.parameters(), **HYPERS))


def wire_alone(model: LanguageModel, _: Batch) -> Trainer:
    """The least that must be sent, in one message per peer, both directions at once, and nothing else."""
    rank, world_size, ranks = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    peers = [peer for peer in range(rank % ranks, world_size, ranks) if peer != rank]
    sent = torch.zeros(2 * sum(p.nbytes for p in model.parameters()) // world_size, dtype=torch.uint8)
    received, loss = [torch.empty_like(sent) for _ in peers], torch.zeros(())

    def exchange() -> None:
        works = [dist.irecv(into, peer) for into, peer in zip(received, peers, strict=True)]
        works += [dist.isend(sent, peer) for peer in peers]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()
        dist.barrier()  # so that all ranks of a host share the wire

    return Trainer(lambda *_: loss, lambda _: None, exchange)


def ours(
    model: LanguageModel, _: Batch, bucket_mb: float | None, *, late: bool, dtype: torch.dtype | None = None
) -> Trainer:
    """zero_opt; ``late`` gathers parameters in the background, ``dtype`` is that of gradients between hosts."""
    given: dict[str, Any] = {
        "reduction": zero_opt.Overlapped(bucket_mb, overlap_param_gather=model if late else None),
        "precision": zero_opt.MixedPrecision(between_hosts_dtype=dtype),
    }
    return trainer(model, zero_opt.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **given, **HYPERS))


def systems(bucket_mb: Sequence[float]) -> dict[str, System]:
    """What is compared, by name."""
    found = {
        ALONE: System(alone, trains=False),
        "the wire alone": System(wire_alone, trains=False),
        DDP: System(ddp_adamw),
        "DDP, fp16_compress_hook": System(partial(ddp_adamw, hook=fp16_compress_hook)),
        "DDP + ZeroRedundancyOptimizer": System(zero_redundancy),
    }
    for size in (None, *bucket_mb):
        own = "" if size is None else f"bucket_mb={size:g}"
        more = "overlap_param_gather=model" + (f", {own}" if own else "")
        found[f"Overlapped({own})"] = System(partial(ours, bucket_mb=size, late=False), ours=True)
        found[f"Overlapped({more})"] = System(partial(ours, bucket_mb=size, late=True), ours=True)
        rounded = partial(ours, bucket_mb=size, late=True, dtype=torch.bfloat16)
        found[f"Overlapped({more}), between_hosts_dtype=torch.bfloat16"] = System(rounded, ours=True)
    return found


@dataclass(frozen=True)
class Layout:
    """So many hosts, with so many ranks each."""

    hosts: int
    ranks: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From ``2x1``."""
        hosts, _, ranks = text.partition("x")
        return cls(int(hosts), int(ranks))

    def join(self, network: Network, rank: int) -> str:
        """Put a rank on its host."""
        network.join(rank // self.ranks)
        os.environ.update(LOCAL_RANK=str(rank % self.ranks), LOCAL_WORLD_SIZE=str(self.ranks))
        return INTERFACE


@dataclass
class Results:
    """Everything measured in one layout.

    Attributes:
        rounds: by system, one outcome per round; rounds of the same index ran one after the other.
        use: by system, the part of the wire that host 0 used in each column of time, when it sent and received.
        column_s: the time of a column.
    """

    layout: Layout
    model_bytes: int
    rounds: dict[str, list[Outcome]] = field(default_factory=dict)
    use: dict[str, list[list[float]]] = field(default_factory=dict)
    column_s: float = 0.0

    def seconds(self, name: str) -> list[float]:
        """Of a step, in each round."""
        return [outcome.total / 1e3 for outcome in self.rounds[name]]

    def ratios(self, name: str, peer: str) -> list[float]:
        """Of steps, round by round, so that what the machine did meanwhile cancels."""
        return [a / b for a, b in zip(self.seconds(name), self.seconds(peer), strict=True)]

    def sent(self, name: str) -> float:
        """Bytes per host and step."""
        return statistics.median(outcome.wire for outcome in self.rounds[name])

    @property
    def least_bytes(self) -> float:
        """What each host must send per step."""
        return 2 * (self.layout.hosts - 1) / self.layout.hosts * self.model_bytes


def measure(layout: Layout, arguments: argparse.Namespace) -> Results:
    """All rounds in one layout."""
    batch = Batch(arguments.rows, arguments.tokens)
    nbytes = sum(p.numel() * p.element_size() for p in make_model(batch.tokens).parameters())
    results, compared = Results(layout, nbytes), systems(arguments.bucket_mb)
    names, wires = list(compared), {}
    with Network(layout.hosts) as network:
        network.link(rate=1e9 * arguments.gbit, round_trip_s=arguments.round_trip_ms / 1e3)
        join = partial(layout.join, network)
        for number in range(arguments.rounds):
            turn, drawn = number * len(names) // arguments.rounds, arguments.draw and number == arguments.rounds - 1
            for name in names[turn:] + names[:turn]:
                count = layout.hosts * layout.ranks
                run = Run(name, count, batch, arguments.warmup, arguments.steps, systems=compared, join=join)
                with Wire(lambda: network.carried()[0]) if drawn else contextlib.nullcontext() as wire:
                    outcome = execute(run)
                results.rounds.setdefault(name, []).append(outcome)
                wires[name] = wire
                say(f"{layout.hosts}x{layout.ranks}, round {number + 1}: {name} {outcome.total / 1e3:.2f} s")
    if arguments.draw:
        add_use(results, wires, arguments)
    same_loss(results.rounds, compared, DDP, arguments.tolerance)
    return results


def add_use(results: Results, wires: dict[str, Wire], arguments: argparse.Namespace) -> None:
    """What the wire was used for, in a step amid the timed ones of the last round."""
    last = {name: outcomes[-1] for name, outcomes in results.rounds.items()}
    lengths = {name: (outcome.ended - outcome.began) / arguments.steps for name, outcome in last.items()}
    results.column_s = max(lengths.values()) / COLUMNS
    for name, wire in wires.items():
        began = last[name].began + lengths[name] * (arguments.steps // 2)
        results.use[name] = wire.use(began, began + lengths[name], results.column_s, 1e9 * arguments.gbit)


def section(results: Results) -> list[str]:
    """The table of one layout, and the drawing."""
    layout = results.layout
    head = ["step (least - most)", "s", f"/ {ALONE}", f"/ {DDP}", "sent, MB per host and step", "/ the least"]
    lines = [f"#### {layout.hosts} hosts x {layout.ranks}", "", "| " + " | ".join(head) + " |"]
    lines.append("| --- " + "| ---: " * (len(head) - 1) + "|")
    for name in results.rounds:
        cells = [spread(results.seconds(name), 2), spread(results.ratios(name, ALONE), 2)]
        cells += [spread(results.ratios(name, DDP), 2), f"{results.sent(name) / 1e6:.1f}"]
        cells.append(f"{results.sent(name) / results.least_bytes:.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if results.use:
        lines += [
            "",
            f"One step each, at which part of its rate host 0 sends and receives, {1e3 * results.column_s:.0f} ms",
        ]
        lines += ["per character:", "", "```"]
        for name, (sent, received) in results.use.items():
            if name == ALONE:
                continue
            lines += [name, f"  sends    |{bars(sent)}|", f"  receives |{bars(received)}|"]
        lines.append("```")
    return [*lines, ""]


def report(sections: Sequence[Results], arguments: argparse.Namespace) -> str:
    """The result as markdown."""
    count = sections[0].model_bytes // 4
    return "\n".join(
        [
            f"### One training step between hosts, {today()}",
            "",
            f"`{command(SCRIPT)}`",
            "",
            f"{machine()}; {load()}.",
            "",
            f"Hosts are namespaces of this machine; {arguments.gbit:g} Gbit/s, {arguments.round_trip_ms:g} ms there "
            f"and back. Transformer of {count:,} fp32 parameters ({LAYERS} layers, width {WIDTH}, vocabulary "
            f"{VOCABULARY}), "
            f"{arguments.rows} x {arguments.tokens} tokens per rank, gloo, one thread per rank. "
            f"{arguments.rounds} interleaved rounds of {arguments.warmup} + {arguments.steps} steps.",
            "",
            *(line for results in sections for line in section(results)),
        ]
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=Layout.parse, nargs="+", default=[Layout(2, 1), Layout(2, 2)])
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[], help="more sizes of zero_opt's buckets")
    parser.add_argument("--gbit", type=float, default=1.0, help="per second, between hosts, each way")
    parser.add_argument("--round-trip-ms", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each system in a round")
    parser.add_argument("--rows", type=int, default=Batch.rows, help="sequences per rank")
    parser.add_argument("--tokens", type=int, default=Batch.tokens, help="tokens per sequence")
    parser.add_argument("--tolerance", type=float, default=0.01, help="relative difference between last losses")
    parser.add_argument("--draw", action="store_true", help="draw what the wire carries over time")
    add_write(parser)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write if asked to."""
    arguments = parse()
    try:
        text = report([measure(layout, arguments) for layout in arguments.layouts], arguments)
    except Unavailable as why:
        say(f"not measured: {why}")
        return
    publish(arguments.write, "hosts", text)


if __name__ == "__main__":
    main()
