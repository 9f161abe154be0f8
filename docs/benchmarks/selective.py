"""How well the demo model learns when most columns are stepped once per window, beside every step.

    python docs/benchmarks/selective.py [--write docs/benchmarks/results/]

The GPT of docs/examples/train_text.py is trained by one process, with its optimizer's state in host memory, on the same
batches from each of several seeds, plainly and with Selective. The work of the step off device is counted in elements.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.machine import command, machine, today, write_result

import zero_opt
from zero_opt import CPUOffload, Selective

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from text_data import Corpus, load_corpus, random_batch, scoring_windows
from text_model import GPT, ModelSize, parameter_groups

SCRIPT = "docs/benchmarks/selective.py"
PLAIN = "every step"
POINTS = 10  # of a curve


@dataclass
class Outcome:
    """One training run.

    Attributes:
        bits: held-out bits per byte, by steps done. work: elements stepped off device.
    """

    bits: dict[int, float] = field(default_factory=dict)
    work: int = 0


def policies(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is compared: offload policies by name."""
    rest = (arguments.select_interval, arguments.update_interval, int(arguments.warm_up * arguments.steps))
    return {
        PLAIN: CPUOffload(),
        f"the {arguments.topk_ratio:.0%} largest columns": CPUOffload(selective=Selective(arguments.topk_ratio, *rest)),
    }


@torch.no_grad()
def held_out_bits(model: GPT, corpus: Corpus, every: int = 1) -> float:
    """Bits per byte over the held-out text, or over one of so many parts of it."""
    nats = scored = 0.0
    for number, (tokens, targets) in enumerate(scoring_windows(corpus.held_out, model.size.context, batch=64)):
        if number % every:
            continue
        nats += model.loss(tokens, targets, reduction="sum").item()
        scored += float((targets >= 0).sum())
    return nats / scored / math.log(2)


def count_work(optimizer: zero_opt.ShardedOptimizer, outcome: Outcome) -> None:
    """Have the elements counted that are stepped where the offload policy has them."""
    wiring: Any = optimizer._sharded
    home = getattr(wiring.placement, "_home", wiring.placement)
    whole = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    step, set_stretches = home.step, getattr(home, "set_stretches", None)

    def counted(index: int, stretches: Sequence[Any], gradients: int) -> None:
        outcome.work += sum(stretch.stop - stretch.start for stretch in stretches)
        set_stretches(index, stretches, gradients)

    def counted_step(*args: Any) -> Any:
        outcome.work += whole
        return step(*args)

    if home is wiring.placement:
        home.step = counted_step
    else:
        home.set_stretches = counted


def train(offload: Any, seed: int, steps: int, lr: float, corpus: Corpus) -> Outcome:
    """Train, and look at the held-out text now and then."""
    model, outcome = GPT(ModelSize(), seed=seed), Outcome()
    optimizer = zero_opt.ShardedOptimizer(
        parameter_groups(model), torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), fused=True, offload=offload,
        max_grad_norm=1.0,
    )  # fmt: skip
    count_work(optimizer, outcome)
    for step in range(steps):
        for group in optimizer.param_groups:
            warm_up = min(1.0, (step + 1) / max(1, steps // 20))
            group["lr"] = lr * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        tokens, targets = random_batch(corpus.train, 16, model.size.context, seed * steps + step)
        model.loss(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(steps // POINTS, 1) == 0 or step + 1 == steps:
            outcome.bits[step + 1] = held_out_bits(model, corpus, every=1 if step + 1 == steps else 12)
    optimizer.close()
    return outcome


def report(results: dict[str, list[Outcome]], arguments: argparse.Namespace) -> str:
    """The result as markdown."""
    plain, seeds = results[PLAIN], len(results[PLAIN])
    ends = {name: [outcome.bits[arguments.steps] for outcome in found] for name, found in results.items()}
    base = statistics.mean(ends[PLAIN])
    warm_up = int(arguments.warm_up * arguments.steps)
    lines = [
        f"### Selective update beside every step, {today()}",
        "",
        f"`{command(SCRIPT)}`",
        "",
        f"{machine()}. Held-out bits per byte of the demo model after {arguments.steps} steps, {seeds} seeds; windows "
        f"of {arguments.update_interval} steps, columns selected every {arguments.select_interval}, the first "
        f"{warm_up} steps plain; peak learning rate {arguments.lr:g}. Work: elements stepped off device, beside "
        "every step's.",
        "",
        "| columns stepped at every step | mean | beside every step | per seed | work off device |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for name, found in results.items():
        mean, work = statistics.mean(ends[name]), sum(outcome.work for outcome in found)
        each = ", ".join(f"{bits:.4f}" for bits in ends[name])
        share = work / sum(outcome.work for outcome in plain)
        lines.append(f"| {name} | {mean:.4f} | {mean / base - 1:+.2%} | {each} | {share:.3f} |")
    return "\n".join(lines)


def draw(results: dict[str, list[Outcome]], path: Path) -> None:
    """Held-out bits per byte over steps, the mean of seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, found in results.items():
        steps = list(found[0].bits)
        axis.plot(steps, [statistics.mean(outcome.bits[step] for outcome in found) for step in steps], label=name)
    axis.set(xlabel="steps", ylabel="held-out bits per byte")
    axis.legend(title="columns stepped at every step")
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Train, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=230)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate, of all")
    parser.add_argument("--topk-ratio", type=float, default=0.1)
    parser.add_argument("--update-interval", type=int, default=4)
    parser.add_argument("--select-interval", type=int, default=4)
    parser.add_argument("--warm-up", type=float, default=0.15, help="share of the steps that are made plainly first")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="also write the result to this folder")
    arguments = parser.parse_args()
    corpus = load_corpus()
    results: dict[str, list[Outcome]] = {name: [] for name in policies(arguments)}
    for seed in range(arguments.seeds):
        for name, offload in policies(arguments).items():
            results[name].append(train(offload, seed, arguments.steps, arguments.lr, corpus))
            print(f"seed {seed}, {name}: {results[name][-1].bits[arguments.steps]:.4f}", file=sys.stderr, flush=True)
    text = report(results, arguments)
    print(text)
    if arguments.write:
        draw(results, arguments.write / "selective.png")
        write_result(arguments.write, "selective", text + "\n\n![curves](selective.png)")


if __name__ == "__main__":
    main()
