"""What a step costs each rank as ranks become many: messages, bytes, descriptors, seconds of processor.

    python docs/benchmarks/scale.py [--params 7e9] [--per-host 8] [--worlds 64 512 4096] [--rounds 5] [--write]

Measured, here: the processor time of a message between two forked ranks over gloo by the loopback interface, by its
size (both ends' Python and gloo threads included), and of one rank's report when an agreement reads it.

Counted: messages and bytes of one bucket, which the real ``PairwiseExchange`` announces, sends and receives at each
number of ranks, with peers that are not there; connections are those of the real ``partners``. All else is arithmetic
over those two: a model, of one gradient bucket after the other and of no waiting. What is moved through shared memory
within a host is left out, as are the network's rate and delay.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.forked import forked
from support.machine import add_write, command, load, machine, publish, pyplot, today

import zero_opt
from zero_opt.comm.agreement import StepReport
from zero_opt.comm.exchange import BucketReduction, Ident, ParamRuns, Run, StagingPool
from zero_opt.comm.groups import INLINE_BYTES
from zero_opt.comm.lazy_gloo import partners
from zero_opt.comm.pairwise_exchange import PairwiseExchange

SCRIPT = "docs/benchmarks/scale.py"
SMALL, LARGE = 256, 1 << 20  # bytes of the messages that are measured
RING, LISTENING, SPARE = 2, 2, 18  # descriptors of both groups besides those of partners; as measured at W = 256


class Costs(NamedTuple):
    """Processor seconds at one end of a message: the mean of both ends.

    Attributes:
        message: per message. byte: per byte. report: to read one rank's report.
    """

    message: float
    byte: float
    report: float


class Peers:
    """A process group whose peers are in every exchange; counts what is sent."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self.messages = self.nbytes = 0

    def connect(self, peers: Any) -> None:
        """Nothing to connect."""

    def send_to(self, tensor: torch.Tensor, dst: int, tag: int) -> Peers:  # noqa: ARG002
        """Count it."""
        self.messages += 1
        self.nbytes += tensor.numel() * tensor.element_size()
        return self

    def receive_from(self, tensor: torch.Tensor, src: int, tag: int) -> Peers:  # noqa: ARG002
        """Be in the same exchange: headers are zeros, as the ident is."""
        tensor.zero_()
        return self

    def wait(self, seconds: float | None = None) -> None:
        """Nothing is under way."""


def bucket(world_size: int, numel: int) -> Peers:
    """What one rank of a flat exchange sends for one bucket: its reduction and its gather."""
    peers = Peers(world_size)
    exchange = PairwiseExchange(peers, peers, StagingPool())
    share = math.ceil(numel / world_size)
    values, bounds = torch.zeros(share * world_size), range(0, share * world_size + 1, share)
    runs = [Run(0, values.numel(), values)]
    exchange.reduce_runs(BucketReduction(Ident(0, 0, 0), runs, bounds, torch.zeros(share)))
    exchange.gather_runs(Ident(0, 0, 0), ParamRuns(runs), bounds)()
    return peers


def _messages(rank: int, _: int, nbytes: int, count: int) -> float:
    """Seconds of processor per message that this rank sends or receives."""
    tensors = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    group = dist.group.WORLD
    assert group is not None
    for number in range(2):
        begun = time.process_time()
        for tag in range(count if number else 10):
            works = [group.recv([tensors[0]], 1 - rank, tag), group.send([tensors[1]], 1 - rank, tag)]
            for work in works:
                work.wait()
    return (time.process_time() - begun) / (2 * count)


def measure(rounds: int) -> Costs:
    """Medians over rounds."""
    small = [statistics.mean(forked(_messages, 2, SMALL, 1000)) for _ in range(rounds)]
    large = [statistics.mean(forked(_messages, 2, LARGE, 100)) for _ in range(rounds)]
    raw, reports = StepReport(1, 1, 1, 1, 1).pack(16, failed=False), list[float]()
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(4096):
            StepReport.unpack(raw, 16)
        reports.append((time.process_time() - begun) / 4096)
    message = statistics.median(small)
    return Costs(message, (statistics.median(large) - message) / (LARGE - SMALL), statistics.median(reports))


class Row(NamedTuple):
    """One rank and step."""

    layout: str
    world_size: int
    messages: float
    nbytes: float
    descriptors: int
    exchange_s: float
    agreement_s: float


def row(world_size: int, hosts: int, numel: float, bucket_mb: float, costs: Costs) -> Row:
    """The model; ``hosts``: that exchange in two stages, 0 for a flat exchange."""
    peers, share = (hosts, world_size // hosts) if hosts else (world_size, 1)
    buckets = math.ceil(numel * 4 / (bucket_mb * 2**20))
    # Of a host's sums, each of its ranks sends a share.
    one = bucket(peers, math.ceil(numel / buckets / share))
    sent, nbytes = one.messages * buckets, one.nbytes * buckets
    rounds = math.ceil(math.log2(world_size))
    report = INLINE_BYTES + 40
    agreed = 2 * rounds * costs.message + world_size * (report * 2 * costs.byte + costs.report)
    others = {rank * share for rank in range(1, peers)}
    descriptors = len(partners(0, world_size) | others) + RING + LISTENING + SPARE
    exchange_s = 2 * (sent * costs.message + nbytes * costs.byte)
    layout = f"{hosts} hosts x {share}" if hosts else "flat"
    return Row(layout, world_size, sent + rounds, nbytes + world_size * report, descriptors, exchange_s, agreed)


def table(rows: list[Row]) -> list[str]:
    """One row per layout and number of ranks."""
    head = ["W", "exchange", "messages sent", "sent, GB", "descriptors", "exchange, s", "agreement, s"]
    lines = ["| " + " | ".join(head) + " |", "| ---: | --- " + "| ---: " * 5 + "|"]
    for r in rows:
        cells = [f"{r.world_size:,}", r.layout, f"{r.messages:,.0f}", f"{r.nbytes / 1e9:.1f}", f"{r.descriptors:,}"]
        lines.append("| " + " | ".join([*cells, f"{r.exchange_s:.1f}", f"{r.agreement_s:.3f}"]) + " |")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Seconds of processor and descriptors over the number of ranks."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, kind in (("flat", True), ("in two stages", False)):
        of_kind = [r for r in rows if (r.layout == "flat") == kind]
        worlds = [r.world_size for r in of_kind]
        left.loglog(worlds, [r.exchange_s for r in of_kind], "o-", label=f"exchange, {name}")
        right.loglog(worlds, [r.descriptors for r in of_kind], "o-", label=name)
    left.loglog(worlds, [r.agreement_s for r in of_kind], "s--", label="agreement")
    right.axhline(1024, color="gray", linestyle=":", label="1,024")
    left.set(xlabel="ranks", ylabel="s of processor per rank and step (model)")
    right.set(xlabel="ranks", ylabel="descriptors per rank, beside the user's group")
    left.legend()
    right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def verdict(rows: list[Row], per_host: int) -> list[str]:
    """What breaks first."""
    full = next((r.world_size for r in rows if r.layout == "flat" and r.descriptors > 1024), None)
    last, staged = [r for r in rows if r.layout == "flat"][-1], rows[-1]
    lines = ["The user's own gloo group comes on top, with a connection to every rank: W - 1 descriptors."]
    if full:
        lines.append(f"A flat exchange is the first to break: at W = {full:,} it takes more than 1,024 descriptors.")
    lines += [
        f"At W = {last.world_size:,} it also takes {last.exchange_s / staged.exchange_s:.1f} times the processor of "
        f"two stages over hosts of {per_host} ranks. What grows with W there is the number of hosts: messages, and the "
        "size of a report times W. Where a step's exchange takes longer than its backward, use NCCL, or MPI's "
        "collectives, between hosts: their rings and trees send to few peers, whatever W is.",
    ]
    return lines


def main() -> None:
    """Measure, count, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=7e9)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    add_write(parser)
    arguments = parser.parse_args()
    costs, size = measure(arguments.rounds), zero_opt.Overlapped().bucket_mb or 25.0
    rows = [
        row(world, world // arguments.per_host if staged else 0, arguments.params, size, costs)
        for staged in (False, True)
        for world in arguments.worlds
    ]
    lines = [f"### Many ranks, {today()}", "", f"`{command(SCRIPT)}`", "", f"{machine()}; {load()}.", ""]
    lines += [
        f"Measured: {costs.message * 1e6:.0f} us of processor at each end of a message, {costs.byte * 1e9:.2f} ns per "
        f"byte, {costs.report * 1e6:.1f} us to read a rank's report. Counted: messages, bytes, connections. The rest "
        f"is a model, per rank and step, of {arguments.params:,.0f} fp32 parameters in buckets of {size:g} MiB; shared "
        "memory within a host, and the network, are left out.",
        "",
        *table(rows),
        "",
        *verdict(rows, arguments.per_host),
    ]
    publish(arguments.write, "scale", "\n".join(lines), "many ranks", partial(draw, rows))


if __name__ == "__main__":
    main()
