"""How well the demo's model learns under several kinds of one thing: trained from several seeds, told as a table.

The model, its text and its learning rates are those of docs/examples/train_text.py. A kind is judged by its held-out
bits per byte less those of the first kind from the same seed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.machine import add_write, command, machine, publish, say, today
from torch import Tensor

import zero_opt

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from text_data import Corpus, load_corpus, random_batch, scoring_windows
from text_model import GPT, ModelSize, parameter_groups

LR, ROWS = 5e-3, 16  # at the peak; windows per rank and step


class Trained(NamedTuple):
    """Held-out bits per byte, and figures for further columns."""

    bits: float
    figures: tuple[float, ...] = ()


def learning_rate(peak: float, step: int, steps: int) -> float:
    """That of a step: up over the first twentieth, then down a cosine to a tenth."""
    warm_up = min(1.0, (step + 1) / max(1, steps // 20))
    return peak * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@torch.no_grad()
def held_out_bits(loss: Callable[..., Tensor], corpus: Corpus, context: int, batch: int = 64, every: int = 1) -> float:
    """Return bits per byte over the held-out text, or over one of so many parts of it.

    Args:
        loss: called as ``loss(tokens, targets, reduction="sum")`` with ``batch`` windows of ``context`` bytes.
    """
    nats = scored = 0.0
    for number, (tokens, targets) in enumerate(scoring_windows(corpus.held_out, context, batch)):
        if number % every:
            continue
        nats += loss(tokens, targets, reduction="sum").item()
        scored += float((targets >= 0).sum())
    return nats / scored / math.log(2)


def train_rank(seed: int, steps: int, cls: Any, **options: Any) -> float:
    """Train on this rank of the default group; returns, on rank 0, the held-out bits per byte."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus, model = load_corpus(), GPT(ModelSize(), seed=seed)
    optimizer = zero_opt.ShardedOptimizer(
        parameter_groups(model), cls, lr=LR, betas=(0.9, 0.95), max_grad_norm=1.0, **options
    )
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(LR, step, steps)
        batch = (seed * steps + step) * world_size + rank
        tokens, targets = random_batch(corpus.train, ROWS, model.size.context, batch)
        model.loss(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    bits = held_out_bits(model.loss, corpus, model.size.context) if rank == 0 else math.nan
    dist.barrier()
    optimizer.close()
    return bits


@dataclass(frozen=True)
class Study:
    """What a benchmark compares.

    Attributes:
        name: of the script and its result. title: of the result. who: trains, as "two ranks of one host".
        kinds: what is compared, by name; all are compared with the first.
        train: called with a kind, a seed and a number of steps.
        columns: what the figures of :class:`Trained` are, and how many digits each has.
    """

    name: str
    title: str
    who: str
    kinds: Mapping[str, Any]
    train: Callable[[Any, int, int], Trained]
    columns: Mapping[str, int]

    def main(self, description: str | None) -> None:
        """Train, print, and write if asked to."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--steps", type=int, default=150)
        parser.add_argument("--seeds", type=int, default=3)
        add_write(parser)
        arguments = parser.parse_args()
        results: dict[str, list[Trained]] = {name: [] for name in self.kinds}
        for seed in range(arguments.seeds):
            for name, kind in self.kinds.items():
                results[name].append(self.train(kind, seed, arguments.steps))
                say(f"seed {seed}, {name}: {results[name][-1]}")
        text = self._report(results, arguments.steps)
        publish(arguments.write, self.name, text)

    def _report(self, results: Mapping[str, Sequence[Trained]], steps: int) -> str:
        """The result as markdown."""
        plain = [found.bits for found in next(iter(results.values()))]
        first, heads = next(iter(self.kinds)), "".join(f" {name} |" for name in self.columns)
        lines = [
            f"### {self.title}, {today()}",
            "",
            f"`{command(f'docs/benchmarks/{self.name}.py')}`",
            "",
            f"{machine()}. Held-out bits per byte of the demo model after {steps} steps, {len(plain)} seeds, "
            f"{self.who}.",
            "",
            f"| | mean | beside {first} | from seed to seed (standard deviation) | less {first} from the same seed |"
            + heads,
            "| --- | ---: | ---: | ---: | --- |" + " ---: |" * len(self.columns),
        ]
        for name, found in results.items():
            bits = [trained.bits for trained in found]
            means = map(statistics.mean, zip(*(trained.figures for trained in found), strict=True))
            cells = [
                name,
                f"{statistics.mean(bits):.4f}",
                f"{100 * (statistics.mean(bits) / statistics.mean(plain) - 1):+.2f} %",
                f"{statistics.stdev(bits) if len(bits) > 1 else math.nan:.4f}",
                ", ".join(f"{a - b:+.4f}" for a, b in zip(bits, plain, strict=True)),
                *(f"{mean:.{digits}f}" for mean, digits in zip(means, self.columns.values(), strict=True)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)
