"""Tables, ratios and the chart of a training-step benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.machine import pyplot, spread
from support.ranks import Outcome
from support.systems import DDP, DEEPSPEED, FLOOR, SHARE, STATIC_DDP, SYSTEMS, ZERO, System

PARTS = ("forward", "backward", "step")
# In a round the faster one of DDP and DDP with a static graph.
BEST_DDP = "DDP's best"
# What the README shows, by the name it has there.
SHOWN = {
    "forward and backward alone": FLOOR,
    "**`ShardedOptimizer`, `Overlapped()`**": "Overlapped()",
    '`Overlapped(exchange="backend")`, by messages as between hosts': 'Overlapped(exchange="backend")',
    "DDP": DDP,
    "DDP with `static_graph=True`": STATIC_DDP,
    "DDP + `ZeroRedundancyOptimizer`": ZERO,
    "FSDP2": "FSDP2 + AdamW",
    "DeepSpeed ZeRO-2": DEEPSPEED,
}


@dataclass
class Results:
    """Everything measured at one world size.

    Attributes:
        rounds: by system, one outcome per round; rounds of the same index ran one after the other.
        pss: by system, peak memory of a rank in bytes.
        absent: by system, why it did not run.
        model_bytes: size of the parameters.
    """

    world_size: int
    model_bytes: int
    rounds: dict[str, list[Outcome]] = field(default_factory=dict)
    pss: dict[str, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def values(self, system: str, name: str) -> list[float]:
        """One field of every round."""
        if system == BEST_DDP:
            return list(map(min, self.values(DDP, name), self.values(STATIC_DDP, name)))
        return [getattr(outcome, name) for outcome in self.rounds[system]]

    def median(self, system: str, name: str) -> float:
        """Median over rounds of one field."""
        return statistics.median(self.values(system, name))

    def ratios(self, system: str, peer: str, name: str = "total") -> list[float]:
        """Of one field, round by round, so that what the machine did meanwhile cancels."""
        return [a / b for a, b in zip(self.values(system, name), self.values(peer, name), strict=True)]

    @property
    def minimal_wire_bytes(self) -> float:
        """What a reduce-scatter and an all-gather of the parameters must send per rank."""
        return 2 * (self.world_size - 1) / self.world_size * self.model_bytes


def table(results: Results) -> list[str]:
    """One row per system."""
    head = ["ms per step, median of rounds", *PARTS, "total (least - most)", "CPU", "sent, MB", "peak PSS, MB", "loss"]
    lines = ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    for name in SYSTEMS:
        if name in results.absent:
            lines.append(f"| {name} | {results.absent[name]} |" + " |" * (len(head) - 2))
            continue
        cells = [f"{results.median(name, part):.0f}" for part in PARTS]
        cells += [spread(results.values(name, "total"), 0), f"{results.median(name, 'cpu'):.0f}"]
        cells += [f"{results.median(name, 'wire') / 1e6:.2f}", f"{results.pss[name] / 1e6:.0f}"]
        cells.append(f"{results.median(name, 'loss'):.4f}" if SYSTEMS[name].trains else "not trained")
        label = f"zero_opt: {name}" if SYSTEMS[name].ours else name
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def ratio_table(results: Results) -> list[str]:
    """Ours beside each peer: whole step, processor time, bytes sent, memory."""
    peers = [BEST_DDP, *(peer for peer in (ZERO, DEEPSPEED) if peer in results.rounds)]
    head = [f"step / {peer}" for peer in peers] + [f"CPU / {BEST_DDP}", "sent / minimum", f"PSS / {ZERO}"]
    lines = ["| ratio (least - most of rounds) | " + " | ".join(head) + " |", "| --- " + "| ---: " * len(head) + "|"]
    for name in [FLOOR, SHARE, *(name for name, system in SYSTEMS.items() if system.ours)]:
        cells = [spread(results.ratios(name, peer), 2) for peer in peers]
        cells.append(spread(results.ratios(name, BEST_DDP, "cpu"), 2))
        cells.append(f"{results.median(name, 'wire') / results.minimal_wire_bytes:.4f}")
        cells.append(f"{results.pss[name] / results.pss[ZERO]:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def section(results: Results) -> list[str]:
    """Everything about one world size."""
    minimum = results.minimal_wire_bytes / 1e6
    return [
        f"#### {results.world_size} ranks",
        "",
        *table(results),
        "",
        *ratio_table(results),
        "",
        f"The minimum to send is 2 (W-1)/W of the parameters: {minimum:.2f} MB per rank and step.",
        "",
    ]


def readme(results: Results) -> str:
    """The README's paragraph and table of one world size."""
    lines = [
        f"Time of one step of a {results.model_bytes / 4e6:.1f} M-parameter transformer with fused AdamW, "
        f"{results.world_size} gloo ranks of one host, one thread each,",
        f"median of {len(results.rounds[DDP])} interleaved rounds. DDP has `gradient_as_bucket_view=True`. Ratios are",
        "to the faster of DDP's two forms in the same round ([results](docs/benchmarks/results/train_step.md);",
        "`python docs/benchmarks/train_step.py`):",
        "",
        "| | ms | beside DDP's best | memory per rank, MB |",
        "| --- | ---: | ---: | ---: |",
    ]
    for label, name in SHOWN.items():
        if name in results.rounds:
            ratio = statistics.median(results.ratios(name, BEST_DDP))
            lines.append(
                f"| {label} | {results.median(name, 'total'):.0f} | {ratio:.2f} | {results.pss[name] / 1e6:.0f} |"
            )
    return "\n".join(lines)


def same_loss(
    rounds: Mapping[str, Sequence[Outcome]], systems: Mapping[str, System], peer: str, tolerance: float
) -> None:
    """Refuse to compare systems that train differently.

    Args:
        rounds: by system, one outcome per round.

    Raises:
        RuntimeError: in a round, a system's last loss is off from the peer's by more than ``tolerance``, relatively.
    """
    for name, outcomes in rounds.items():
        worst = max(abs(ours.loss / theirs.loss - 1) for ours, theirs in zip(outcomes, rounds[peer], strict=True))
        if systems[name].trains and worst > tolerance:
            raise RuntimeError(f"{name} ends at another loss than {peer}: off by {worst:.2%}")


def draw(sections: Sequence[Results], title: str, path: Path) -> None:
    """Stacked bars of forward, backward and step, one panel per world size."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(sections), figsize=(7 * len(sections), 5), squeeze=False, layout="constrained")
    for axis, results in zip(axes[0], sections, strict=True):
        names = sorted(results.rounds, key=_by_total(results), reverse=True)
        left = [0.0] * len(names)
        for part, color in zip(PARTS, ("#9ecae1", "#4292c6", "#f16913"), strict=True):
            widths = [results.median(name, part) for name in names]
            axis.barh(names, widths, left=left, color=color, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, name in enumerate(names):
            axis.text(left[row], row, f" {results.median(name, 'total'):.0f}", va="center")
        for label in axis.get_yticklabels():
            label.set_fontweight("bold" if SYSTEMS[label.get_text()].ours else "normal")
        axis.margins(x=0.12)
        axis.set_xlabel(f"ms per step, {results.world_size} ranks")
    axes[0][0].legend(loc="upper right")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _by_total(results: Results) -> Callable[[str], float]:
    return lambda name: results.median(name, "total")
