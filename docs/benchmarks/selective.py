"""How well models of the demo text learn with what an offload may change about their steps, beside plain ones.

    python docs/benchmarks/selective.py [--settings "the demo"] [--write docs/benchmarks/results/]

The GPT of docs/examples/train_text.py, as the demo trains it, and a smaller one for so long that its curve flattens,
are trained by one process, with their optimizer's state in host memory, on the same batches from each of several
seeds: plainly, with most columns stepped once per window (Selective), and with every step one late (delay=1), after
steps that are not, and with predicted parameters. WorkerOffload(), with and without speculation, CPUOffload and
NVMeOffload give the bits of plain steps, as the tests show, and so that curve. The work of the step off device is
counted in elements.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.convergence import held_out_bits, learning_rate
from support.machine import add_write, command, machine, publish, pyplot, say, today

# The folder of the examples is in sys.path since support.convergence was imported.
from text_data import Corpus, load_corpus, random_batch
from text_model import GPT, ModelSize, parameter_groups

import zero_opt
from zero_opt import CPUOffload, Selective, WorkerOffload
from zero_opt.placement.selective.placement import SelectivePlacement
from zero_opt.sharding.late_params import Unwatched

SCRIPT = "docs/benchmarks/selective.py"
PLAIN = "every step"
DELAYED = "every step, one late"
LATE_AFTER = "the same after a warm-up"
PREDICTED = "the same, with predicted parameters"
SELECTIVE = "the largest columns"
POINTS = 10  # of a curve, the last one excluded
PARTS = 12  # of the held-out text, of which curves take one


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        lr: the peak learning rate, of all. policies: what is compared, by name.
        warm_up: share of the steps that are made plainly before others are late.
    """

    size: ModelSize
    steps: int
    lr: float
    policies: tuple[str, ...]
    warm_up: float


LATE = (PLAIN, DELAYED, LATE_AFTER, PREDICTED)
SMALLER = ModelSize(width=80, layers=2)
SETTINGS = {
    "the demo": Setting(ModelSize(), 230, 5e-3, (*LATE, SELECTIVE), 0.15),
    "a smaller model, longer": Setting(SMALLER, 3000, 5e-3, (*LATE, SELECTIVE), 0.05),
    "half the learning rate": Setting(SMALLER, 3000, 2.5e-3, LATE, 0.05),
}


@dataclass
class Outcome:
    """One training run.

    Attributes:
        bits: bits per byte of a part of the held-out text, by steps done. end: of all of it, at the end.
        work: elements stepped off device.
    """

    bits: dict[int, float] = field(default_factory=dict)
    end: float = math.nan
    work: int = 0


Results = dict[str, dict[str, list[Outcome]]]  # by setting, policy and seed


def offload_of(policy: str, arguments: argparse.Namespace, setting: Setting) -> Any:
    """What is compared by this name."""
    late_from = int(setting.warm_up * setting.steps)
    if policy == DELAYED:
        return WorkerOffload(delay=1)
    if policy == LATE_AFTER:
        return WorkerOffload(delay=1, warmup_steps=late_from)
    if policy == PREDICTED:
        return WorkerOffload(delay=1, warmup_steps=late_from, prediction=arguments.prediction)
    if policy == SELECTIVE:
        rest = (arguments.select_interval, arguments.update_interval, int(arguments.warm_up * setting.steps))
        return CPUOffload(selective=Selective(arguments.topk_ratio, *rest))
    return CPUOffload()


def count_work(optimizer: zero_opt.ShardedOptimizer, outcome: Outcome) -> None:
    """Have the elements counted that are stepped where the offload policy has them."""
    engine: Any = optimizer._engine
    selects = isinstance(engine.placement, SelectivePlacement)
    stepping = engine.placement._inner if selects else engine.placement
    params = [param for group in optimizer.param_groups for param in group["params"]]
    work, step = sum(param.numel() for param in params if param.dim() >= 2 or not selects), stepping.step

    def counted_step(*args: Any) -> Any:
        outcome.work += work
        return step(*args)

    stepping.step = counted_step


def train(offload: Any, seed: int, setting: Setting, corpus: Corpus) -> Outcome:
    """Train, and look at the held-out text now and then."""
    steps, lr = setting.steps, setting.lr
    model, outcome = GPT(setting.size, seed=seed), Outcome()
    optimizer = zero_opt.ShardedOptimizer(
        parameter_groups(model), torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), fused=True, offload=offload,
        max_grad_norm=1.0,
    )  # fmt: skip
    count_work(optimizer, outcome)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(lr, step, steps)
        tokens, targets = random_batch(corpus.train, 16, model.size.context, seed * steps + step)
        model.loss(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(steps // POINTS, 1) == 0 and step + 1 < steps:
            with Unwatched():  # of weights that lack a step, which delay=1 refuses: a flush would change the run
                outcome.bits[step + 1] = held_out_bits(model.loss, corpus, model.size.context, every=PARTS)
    optimizer.flush()
    outcome.end = held_out_bits(model.loss, corpus, model.size.context)
    optimizer.close()
    return outcome


def report(results: Results, arguments: argparse.Namespace) -> str:
    """The result as markdown."""
    lines = [
        f"### Selective update beside every step, {today()}",
        "",
        f"`{command(SCRIPT)}`",
        "",
        f"{machine()}. Held-out bits per byte of the demo text, {arguments.seeds} seeds. Of columns the largest "
        f"{arguments.topk_ratio:.0%} are stepped at every step and selected every {arguments.select_interval}, the "
        f"others in windows of {arguments.update_interval}; the first {arguments.warm_up:.0%} of the steps are plain. "
        f"Predicted: {arguments.prediction:g} times the update more that the last gradient would make again. "
        "Work: elements stepped off device, beside every step's. Every step: the bits, and so the curve, of a plain "
        "optimizer, of any offload without a delay, and of speculation.",
    ]
    for name, found in results.items():
        lines += ["", *table(name, found)]
    return "\n".join(lines)


def table(name: str, results: dict[str, list[Outcome]]) -> list[str]:
    """The result of one setting."""
    setting, plain = SETTINGS[name], results[PLAIN]
    ends = {policy: [outcome.end for outcome in found] for policy, found in results.items()}
    base = statistics.mean(ends[PLAIN])
    lines = [
        f"| {name}: {setting.steps} steps, peak learning rate {setting.lr:g}, warm-up of late steps "
        f"{setting.warm_up:.0%} | mean | beside every step | per seed | "
        "work off device |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for policy, found in results.items():
        mean, work = statistics.mean(ends[policy]), sum(outcome.work for outcome in found)
        each = ", ".join(f"{bits:.4f}" for bits in ends[policy])
        share = work / sum(outcome.work for outcome in plain)
        lines.append(f"| {policy} | {mean:.4f} | {mean / base - 1:+.2%} | {each} | {share:.3f} |")
    return lines


def draw(results: Results, path: Path) -> None:
    """Held-out bits per byte over steps, the mean of seeds; a picture per setting."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(results), figsize=(6 * len(results), 4), layout="constrained", squeeze=False)
    for axis, (name, by_policy) in zip(axes[0], results.items()):
        for policy, found in by_policy.items():
            steps = list(found[0].bits)
            means = [statistics.mean(outcome.bits[step] for outcome in found) for step in steps]
            axis.plot(steps, means, label=policy)
        axis.set(title=name, xlabel="steps", ylabel=f"bits per byte, a {PARTS}th of the held-out text")
        axis.legend(title="stepped at every step")
    figure.savefig(path)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--policies", nargs="+", choices=(*LATE, SELECTIVE), help="of a setting's: these, and plain")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--topk-ratio", type=float, default=0.1)
    parser.add_argument("--update-interval", type=int, default=4)
    parser.add_argument("--select-interval", type=int, default=4)
    parser.add_argument("--warm-up", type=float, default=0.15, help="share of the steps that are made plainly first")
    parser.add_argument("--prediction", type=float, default=1.25, help="of parameters: see WorkerOffload")
    add_write(parser)
    return parser.parse_args()


def main() -> None:
    """Train, print, and write if asked to."""
    arguments = parse_arguments()
    corpus, results = load_corpus(), Results()
    for name in arguments.settings:
        setting = SETTINGS[name]
        chosen = {PLAIN, *(arguments.policies or setting.policies)}
        results[name] = {policy: [] for policy in setting.policies if policy in chosen}
        for seed in range(arguments.seeds):
            for policy in results[name]:
                offload = offload_of(policy, arguments, setting)
                results[name][policy].append(train(offload, seed, setting, corpus))
                end = results[name][policy][-1].end
                say(f"{name}, seed {seed}, {policy}: {end:.4f}")
    publish(arguments.write, "selective", report(results, arguments), "curves", partial(draw, results))


if __name__ == "__main__":
    main()
