"""How well the demo model learns with compact Adam state, beside fp32.

    python docs/benchmarks/adam_convergence.py [--write docs/benchmarks/results/]

The GPT of docs/examples/train_text.py is trained by one process with each form of AdamState on the same batches, from
each of several seeds. A form is judged by its held-out bits per byte less those of fp32 from the same seed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

import torch
from support.machine import command, machine, today, write_result

import zero_opt

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from text_data import Corpus, load_corpus, random_batch, scoring_windows
from text_model import GPT, ModelSize, parameter_groups

SCRIPT = "docs/benchmarks/adam_convergence.py"
FORMS = {
    "fp32 moments": zero_opt.AdamState(),
    "bf16 moments": zero_opt.AdamState("bfloat16"),
    "8-bit moments": zero_opt.AdamState("block8"),
}


@torch.no_grad()
def held_out_bits(model: GPT, corpus: Corpus) -> float:
    """Bits per byte over the held-out text."""
    nats = scored = 0.0
    for tokens, targets in scoring_windows(corpus.held_out, model.size.context, batch=64):
        nats += model.loss(tokens, targets, reduction="sum").item()
        scored += float((targets >= 0).sum())
    return nats / scored / math.log(2)


def train(form: zero_opt.AdamState, seed: int, steps: int, corpus: Corpus) -> float:
    """The held-out bits per byte after so many steps."""
    model = GPT(ModelSize(), seed=seed)
    optimizer = zero_opt.CPUAdamW(parameter_groups(model), lr=5e-3, betas=(0.9, 0.95), state=form)
    for step in range(steps):
        for group in optimizer.param_groups:
            warm_up = min(1.0, (step + 1) / max(1, steps // 20))
            group["lr"] = 5e-3 * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        tokens, targets = random_batch(corpus.train, 32, model.size.context, seed * steps + step)
        model.loss(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return held_out_bits(model, corpus)


def report(results: dict[str, list[float]], steps: int) -> str:
    """The result as markdown."""
    seeds = len(results["fp32 moments"])
    lines = [
        f"### Compact Adam moments beside fp32, {today()}",
        "",
        f"`{command(SCRIPT)}`",
        "",
        f"{machine()}. Held-out bits per byte of the demo model after {steps} steps, {seeds} seeds.",
        "",
        "| | mean | from seed to seed (standard deviation) | less fp32 from the same seed |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, bits in results.items():
        differences = ", ".join(f"{a - b:+.4f}" for a, b in zip(bits, results["fp32 moments"]))
        spread = statistics.stdev(bits) if seeds > 1 else math.nan
        lines.append(f"| {name} | {statistics.mean(bits):.4f} | {spread:.4f} | {differences} |")
    return "\n".join(lines)


def main() -> None:
    """Train, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="also write the result to this folder")
    arguments = parser.parse_args()
    corpus = load_corpus()
    results: dict[str, list[float]] = {name: [] for name in FORMS}
    for seed in range(arguments.seeds):
        for name, form in FORMS.items():
            results[name].append(train(form, seed, arguments.steps, corpus))
            print(f"seed {seed}, {name}: {results[name][-1]:.4f}", file=sys.stderr, flush=True)
    text = report(results, arguments.steps)
    print(text)
    if arguments.write:
        write_result(arguments.write, "adam_convergence", text)


if __name__ == "__main__":
    main()
