"""A training step with state in host memory, on one GPU, beside torch, DeepSpeed and torchao.

    python docs/benchmarks/gpu.py --row worker [--params 1.3e9]     # one row, as Markdown
    python docs/benchmarks/gpu.py --all --write docs/benchmarks/results
    python docs/benchmarks/gpu.py --convergence --write docs/benchmarks/results
    python docs/benchmarks/gpu.py --smoke --all                     # tries the script, on any machine

The demo's byte-level GPT, in bf16, trains on random bytes. Each row is a process of its own, which first trains the
model without an optimizer: *bare* is that, in the same process.

- *iteration*: forward, backward and step; the host waits for the device once per round of steps.
- *exposed*: how much longer an iteration takes than a bare one.
- *step()*: the call on the host. A call that reads the norm also waits for the rest of backward, which the host has
  enqueued ahead.
- *gap*: what the device's stream does, or waits for, between the end of backward and the end of the step.
- *peak*: the most that tensors had at once; *reserved*: the most that torch's allocator took from the device, by
  default and with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which is a second process.

Gradients are clipped to a norm that they do not reach. A first use of DeepSpeed compiles its Adam; a compile that
is cut short leaves a file "lock" in TORCH_EXTENSIONS_DIR, for which the next one waits. --convergence trains 100 M
parameters on the demo's text instead, with torch's AdamW and with each offload, and compares the curves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from support.gpu_convergence import DTYPES, Course, convergence
from support.gpu_measure import Size, measured
from support.gpu_systems import SYSTEMS
from support.machine import add_write, command, gpu, load, machine, publish, spread, today, write_result

SCRIPT = "docs/benchmarks/gpu.py"
LIMIT_S = 230.0  # of one process; a row has two
ALLOCATOR, EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
HEAD = (
    "",
    "iteration, ms",
    "of bare",
    "exposed, ms",
    "step(), ms",
    "gap, ms",
    "peak, GiB",
    "reserved, GiB",
    "reserved, expandable, GiB",
)


class DidNotRun(Exception):
    """Why a row has no numbers."""


def own_output(name: str, given: argparse.Namespace, allocator: str) -> dict[str, Any]:
    """Measure a system in a process of its own."""
    options = ["--device", given.device, "--params", str(given.params), "--batch", str(given.batch)]
    options += ["--context", str(given.context), "--rounds", str(given.rounds), "--steps", str(given.steps)]
    environment = {**os.environ, ALLOCATOR: allocator} if allocator else dict(os.environ)
    # DeepSpeed compiles its kernel with a ninja that may be installed beside the interpreter alone.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    call = [sys.executable, str(Path(__file__).resolve()), "--measure", name, *options]
    try:
        done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DidNotRun(f"not done after {LIMIT_S:.0f} s") from error
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"params"')]
    if not answers:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        print(done.stderr, file=sys.stderr)
        raise DidNotRun(f"failed: {said[-1].strip()[:200].replace('|', '/')}")
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def row(name: str, given: argparse.Namespace) -> str:
    """Return a row of the table."""
    system = SYSTEMS[name]
    missing = system.missing(given.device)
    try:
        if missing:
            raise DidNotRun(missing)
        found = own_output(name, given, "")
        twice = given.device == "cuda" and given.expandable
        expandable = f"{own_output(name, given, EXPANDABLE)['reserved']:.2f}" if twice else ""
    except DidNotRun as reason:
        return f"| {system.label} | {reason} |{' |' * (len(HEAD) - 2)}"
    bare = statistics.median(found["bare"])
    exposed = [iteration - bare for iteration in found["iteration"]]
    cells = [
        system.label,
        spread(found["iteration"], 1),
        f"{statistics.median(found['iteration']) / bare:.2f}",
        f"{statistics.median(exposed):.1f}",
        spread(found["step"], 1),
        spread(found["gap"], 1),
        f"{found['allocated']:.2f}",
        f"{found['reserved']:.2f}",
        expandable,
    ]
    return f"| {' | '.join(cells)} |"


def header() -> list[str]:
    """Return the table's first lines."""
    return [f"| {' | '.join(HEAD)} |", f"| --- |{' ---: |' * (len(HEAD) - 1)}"]


def about(title: str) -> list[str]:
    """Return what every result says of where and when it was measured."""
    return [f"### {title}, {today()}", "", f"`{command(SCRIPT)}`", "", f"{gpu()}. {machine()}; {load()}.", ""]


def all_rows(given: argparse.Namespace) -> None:
    """Measure every row, and write what there is after each: a run that is cut short keeps its rows."""
    lines = about("A training step on a GPU")
    lines += [
        f"About {given.params:.3g} bf16 parameters, {given.batch} windows of {given.context} bytes per step; medians "
        f"over {given.rounds} rounds of {given.steps} steps (least - most).",
        "",
        *header(),
    ]
    print("\n".join(lines), flush=True)
    for name in given.rows or SYSTEMS:
        lines.append(row(name, given))
        print(lines[-1], flush=True)
        if given.write:
            write_result(given.write, "gpu", "\n".join(lines))


def curves(given: argparse.Namespace) -> None:
    """Train for the curves."""
    course = Course(given.device, given.params, given.batch, given.context, given.steps)
    text = "\n".join([*about("Training curves on a GPU"), *convergence(course, given.dtypes)]).rstrip()
    publish(given.write, "gpu_convergence", text)


def measure(given: argparse.Namespace) -> None:
    """Print one system's numbers as JSON, for the process that made this one."""
    size = Size(given.device, given.params, given.batch, given.context, given.rounds, given.steps)
    print("\n" + json.dumps(measured(given.measure, size)), flush=True)
    sys.stderr.flush()
    os._exit(0)  # what others leave running is none of ours


def arguments() -> argparse.Namespace:
    """Parse the command line; what is not given depends on what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--row", choices=SYSTEMS, help="print one row")
    what.add_argument("--all", action="store_true", help="print every row (default)")
    what.add_argument("--convergence", action="store_true", help="compare training curves")
    what.add_argument("--header", action="store_true", help="print the head of the table for rows of --row")
    what.add_argument("--measure", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="+", choices=SYSTEMS, metavar="ROW", help="with --all: these alone")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="with --convergence")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--params", type=float, help="about how many (default: 1.3e9; 1e8 for the curves)")
    parser.add_argument("--batch", type=int, help="windows per step (default: 4; 32 for the curves)")
    parser.add_argument("--context", type=int, help="bytes of a window (default: 1024; 256 for the curves)")
    parser.add_argument("--rounds", type=int, help="of steps (default: 5)")
    parser.add_argument("--steps", type=int, help="of a round, or of a curve (default: 4; 200)")
    parser.add_argument("--expandable", action=argparse.BooleanOptionalAction, default=True, help="the second process")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on the CPU where there is no GPU")
    add_write(parser)
    given = parser.parse_args()
    usual = {"params": 1.3e9, "batch": 4, "context": 1024, "rounds": 5, "steps": 4}
    if given.convergence:
        usual |= {"params": 1e8, "batch": 32, "context": 256, "steps": 200}
    if given.smoke:
        usual |= {"params": 2e5, "batch": 2, "context": 32, "rounds": 2, "steps": 12 if given.convergence else 2}
    for name, value in usual.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


def unable(given: argparse.Namespace) -> str | None:
    """Return why nothing can be measured, or None. A smoke test goes to the CPU where there is no GPU."""
    if given.device != "cuda" or torch.cuda.is_available():
        return None
    if given.smoke:
        given.device = "cpu"
        return None
    return f"no GPU: torch {torch.__version__} sees none. --smoke tries this script on the CPU."


def main() -> None:
    """Do what is asked for."""
    given = arguments()
    reason = None if given.header else unable(given)
    if reason is not None:
        print(reason)
    elif given.header:
        print("\n".join(header()))
    elif given.measure:
        measure(given)
    elif given.convergence:
        curves(given)
    elif given.row:
        print(row(given.row, given))
    else:
        all_rows(given)


if __name__ == "__main__":
    main()
