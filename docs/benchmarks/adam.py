"""One Adam step on the CPU, by every implementation there is here, beside the time to read its inputs once.

    python docs/benchmarks/adam.py [--write docs/benchmarks/results/]

Rounds alternate between contenders, whose arrays lie in the same memory, so that all meet the same machine; medians
count, and the fastest round is given too. DeepSpeedCPUAdam takes part if deepspeed is installed (it compiles itself on
first use; DS_ACCELERATOR=cpu).
"""

from __future__ import annotations

import argparse
import gc
import statistics
from functools import partial
from pathlib import Path

import torch
from support.contenders import (
    CAST,
    CAST_KEPT,
    ELEMENT_BYTES,
    FORMS,
    MOVING,
    READING,
    Times,
    bytes_moved,
    fp32_contenders,
    measure,
    pipeline_contenders,
    reduced_bytes,
    reduced_contenders,
)
from support.machine import add_write, command, load, machine, publish, pyplot, say, today

from zero_opt import _native

SCRIPT = "docs/benchmarks/adam.py"
TARGETS = {"one pass": 1.8, "split master": 2.0, "bf16 moments": 2.3, "8-bit moments": 1.8}


def table(title: str, times: Times, unit: str, gigabytes: dict[str, float]) -> list[str]:
    """Rows of median, fastest, ratio to ``unit`` (median of the rounds' ratios) and bytes per second."""
    lines = [
        f"| {title} | ms, median | fastest | times as fast as {unit} | GB/s moved |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, mine in times.items():
        ratio = statistics.median(a / b for a, b in zip(times[unit], mine))
        middle = statistics.median(mine)
        rate = f"{gigabytes[name] / middle * 1e3:.0f}" if name in gigabytes else ""
        lines.append(f"| {name} | {middle:.1f} | {min(mine):.1f} | {ratio:.2f} | {rate} |")
    return [*lines, ""]


def fp32_section(numel: int, threads: int, rounds: int) -> tuple[list[str], Times]:
    """fp32 throughout: torch's three implementations, DeepSpeed's, ours, and the read limit."""
    say(f"fp32, {numel:,} elements, {threads} threads")
    times = measure(partial(fp32_contenders, numel, threads), ELEMENT_BYTES * numel, rounds)
    moved = dict.fromkeys(times, 28e-9 * numel) | {READING: 16e-9 * numel}
    title = f"fp32, {numel / 2**20:g} Mi elements, {threads} threads"
    return table(title, times, "torch fused", moved), times


def reduced_section(numel: int, threads: int, rounds: int) -> tuple[list[str], Times]:
    """bf16 gradients in, bf16 params out, in each form of state."""
    say(f"bf16, {numel:,} elements, {threads} threads")
    times = measure(partial(reduced_contenders, numel, threads), ELEMENT_BYTES * numel, rounds)
    title = f"bf16 gradient and param, {numel / 2**20:g} Mi, {threads} threads"
    return table(title, times, CAST, {k: v * numel * 1e-9 for k, v in reduced_bytes().items()}), times


def pipeline_section(numel: int, threads: int, rounds: int) -> tuple[list[str], Times]:
    """A whole step of mixed-precision training: unscale, norm, clip, Adam, cast."""
    say(f"pipeline, {numel:,} elements, {threads} threads")
    times = measure(partial(pipeline_contenders, numel, threads), ELEMENT_BYTES * numel, rounds)
    title = f"unscale + norm + clip + Adam + cast, {numel / 2**20:g} Mi, {threads} threads"
    return table(title, times, next(iter(times)), {}), times


def verdict(fp32: Times, reduced: Times, pipeline: Times) -> list[str]:
    """The figures that the kernel is held to."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    def ratio(times: Times, unit: str, name: str) -> float:
        return median([a / b for a, b in zip(times[unit], times[name])])

    def over(times: Times, unit: str, name: str, share: float = 1.0) -> str:
        return f"{100 * (share / ratio(times, unit, name) - 1):+.0f} %"

    def bytes_of(name: str) -> float:
        return bytes_moved(*FORMS[name])

    lines = [
        f"- fp32: {ratio(fp32, 'torch fused', 'zero_opt'):.2f} times as fast as torch fused; "
        f"{over(fp32, READING, 'zero_opt')} over the time to read the inputs, {over(fp32, MOVING, 'zero_opt')} over "
        "the time to read and write as much."
    ]
    for name, target in TARGETS.items():
        found, kept = ratio(reduced, CAST, name), ratio(reduced, CAST_KEPT, name)
        lines.append(
            f"- {name}: {found:.2f} times as fast as casting around torch fused, {kept:.2f} if its buffers are kept; "
            f"at least {target} was the aim. {over(reduced, MOVING, name, bytes_of('one pass') / bytes_of(name))} over "
            "the time to read and write as much."
        )
    theirs, fewest, ours = list(pipeline)[:3]
    lines.append(
        f"- the whole step: {ratio(pipeline, theirs, ours):.2f} times as fast as {theirs}, "
        f"{ratio(pipeline, fewest, ours):.2f} as the {fewest}; the aim was 2.5."
    )
    return lines


def draw(fp32: Times, reduced: Times, numel: int, path: Path) -> None:
    """Every contender in the roofline plane: elements per second over bytes per element, under the read limit."""
    moved = reduced_bytes()
    points = {name: (28.0, statistics.median(fp32[name])) for name in ("torch fused", "zero_opt")}
    points |= {name: (moved[name], statistics.median(reduced[name])) for name in (CAST_KEPT, *FORMS)}
    limit = 16 * numel / statistics.median(fp32[READING]) * 1e-6  # GB/s
    figure, axes = pyplot().subplots(figsize=(7, 4.5))
    widths = [8.0, 64.0]
    axes.plot(
        widths, [limit / width for width in widths], "k--", label=f"bytes moved at the read limit, {limit:.0f} GB/s"
    )
    for name, (width, ms) in points.items():
        axes.plot(width, numel / ms * 1e-6, "o")
        axes.annotate(name, (width, numel / ms * 1e-6), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="bytes moved per element", ylabel="10^9 elements per second")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mi", type=float, nargs="+", default=[1, 64], help="sizes, in 2^20 elements; the last counts")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="the last counts")
    parser.add_argument("--rounds", type=int, default=9)
    add_write(parser)
    arguments = parser.parse_args()
    lines = [f"### One Adam step on the CPU, {today()}", "", f"`{command(SCRIPT)}`", ""]
    lines += [f"{machine()}; kernels {_native.isa()}; {load()}.", ""]
    for size in arguments.mi:
        for threads in arguments.threads:
            numel = int(size * 2**20)
            torch.set_num_threads(threads)
            sections = []
            for section in (fp32_section, reduced_section, pipeline_section):
                sections.append(section(numel, threads, arguments.rounds))
                lines += sections[-1][0]
                gc.collect()
    fp32, reduced, pipeline = (times for _, times in sections)
    lines += [f"At {arguments.mi[-1]:g} Mi elements and {threads} threads:", "", *verdict(fp32, reduced, pipeline)]
    text = "\n".join(lines)
    publish(arguments.write, "adam", text, "roofline", partial(draw, fp32, reduced, numel))


if __name__ == "__main__":
    main()
