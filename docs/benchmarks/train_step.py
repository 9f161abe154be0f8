"""One training step of a 33.6 M-parameter transformer: zero_opt beside DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed.

    python docs/benchmarks/train_step.py [--worlds 2 4] [--rounds 5] [--write]

Each round runs every system in turn, in an order that changes from round to round, on freshly forked gloo ranks over
loopback with one thread each; all train the same model on the same data and must end at the same loss. A system's time
is the median over rounds of its ranks' medians over steps; ratios are taken within a round, to the faster of DDP's two
forms. Bytes sent are what the kernel counts on a rank's TCP connections (TCP_INFO), without packet headers. Peak memory
comes from one more run, which is not timed: the sum of the ranks' proportional set sizes (smaps_rollup) divided by
their number, so that a page which ranks share is counted once.

DDP has ``gradient_as_bucket_view=True``, which is faster, and once ``static_graph=True`` too. FSDP2 keeps its
parameters gathered between forward and backward (``reshard_after_forward=False``), which is faster. Every optimizer is
AdamW with ``fused=True``. "compute alone" is forward and backward of independent ranks. "DDP + AdamW of 1/W of the
parameters" is what sharding the step alone would give over gloo: DDP's all-reduce moves as many bytes as a
reduce-scatter and an all-gather, and each rank steps its share. --write also replaces the README's table of one host,
of the first number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from support.machine import RESULTS, add_write, command, load, machine, publish, say, today
from support.model import LAYERS, VOCABULARY, WIDTH, Batch, make_model
from support.ranks import Run, execute
from support.report import Results, draw, readme, same_loss, section
from support.systems import DDP, SYSTEMS, missing

README = Path(__file__).resolve().parents[2] / "README.md"
SCRIPT = "docs/benchmarks/train_step.py"
SAMPLED_STEPS = 3


def measure(world_size: int, arguments: argparse.Namespace) -> Results:
    """All rounds at one world size."""
    batch = Batch(arguments.rows, arguments.tokens)
    count = sum(p.numel() * p.element_size() for p in make_model(batch.tokens).parameters())
    results = Results(world_size, count, absent=missing())
    names = [name for name in SYSTEMS if name not in results.absent]
    for name in names:
        outcome = execute(Run(name, world_size, batch, arguments.warmup, SAMPLED_STEPS, sampled=True))
        results.pss[name] = outcome.pss
        say(f"{world_size} ranks, memory: {name} {outcome.pss / 1e6:.0f} MB")
    for number in range(arguments.rounds):
        turn = number * len(names) // arguments.rounds
        for name in names[turn:] + names[:turn]:
            outcome = execute(Run(name, world_size, batch, arguments.warmup, arguments.steps))
            results.rounds.setdefault(name, []).append(outcome)
            say(f"{world_size} ranks, round {number + 1}: {name} {outcome.total:.0f} ms, {outcome.cpu:.0f} ms CPU")
    same_loss(results.rounds, SYSTEMS, DDP, arguments.tolerance)
    return results


def report(sections: Sequence[Results], arguments: argparse.Namespace) -> str:
    """The result as markdown."""
    size = sections[0].model_bytes
    return "\n".join(
        [
            f"### One training step, {today()}",
            "",
            f"`{command(SCRIPT)}`",
            "",
            f"{machine()}{deepspeed_version()}; {load()}.",
            "",
            f"Transformer of {size // 4:,} fp32 parameters ({LAYERS} layers, width {WIDTH}, vocabulary {VOCABULARY}), "
            f"{arguments.rows} x {arguments.tokens} tokens per rank, gloo over loopback, one thread per rank. "
            f"{arguments.rounds} interleaved rounds of {arguments.warmup} + {arguments.steps} steps.",
            "",
            *(line for results in sections for line in section(results)),
        ]
    )


def deepspeed_version() -> str:
    """``, deepspeed <version>`` where it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return f", deepspeed {version('deepspeed')}"
    return ""


def replace_in_readme(block: str) -> None:
    """Replace the README's table of one host, and the paragraph before it."""
    before, found = README.read_text(), re.compile(r"^Time of one step of (.+\n)+\n(\|.*\n)+", re.MULTILINE)
    after, count = found.subn(lambda _: f"{block}\n", before)
    if count != 1:
        raise RuntimeError(f"the README has {count} such tables")
    README.write_text(after)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each system in a round")
    parser.add_argument("--rows", type=int, default=Batch.rows, help="sequences per rank")
    parser.add_argument("--tokens", type=int, default=Batch.tokens, help="tokens per sequence")
    parser.add_argument("--tolerance", type=float, default=0.01, help="relative difference between last losses")
    add_write(parser)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write if asked to."""
    arguments = parse()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sections = [measure(world_size, arguments) for world_size in arguments.worlds]
    drawing = partial(draw, sections, f"One training step, {today()}")
    publish(arguments.write, "train_step", report(sections, arguments), "times of the table", drawing)
    if arguments.write == RESULTS:
        replace_in_readme(readme(sections[0]))


if __name__ == "__main__":
    main()
