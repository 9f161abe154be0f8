"""What every benchmark says about where, when and how it ran."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results"


def machine() -> str:
    """Processor, cores, versions."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = named[0] if named else model
    cores = len(os.sched_getaffinity(0))
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {cores} cores, {isa}; Python {platform.python_version()}, torch {torch.__version__}"


_LOAD_BEFORE = os.getloadavg()[0]  # the benchmark's own is not in it


def load() -> str:
    """How busy the machine was before the benchmark, which bounds what times on it can tell."""
    return f"{_LOAD_BEFORE:.1f} processes ready to run on average over the minute before"


def today() -> str:
    """The date, in UTC."""
    return str(datetime.datetime.now(datetime.UTC).date())


def command(script: str) -> str:
    """The command line that is running, with ``script`` as the repository names it."""
    return shlex.join(["python", script, *sys.argv[1:]])


def say(text: str) -> None:
    """Print progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def add_write(parser: argparse.ArgumentParser) -> None:
    """Let the command line say ``--write [FOLDER]``."""
    parser.add_argument(
        "--write", type=Path, nargs="?", const=RESULTS, metavar="FOLDER", help="also write the result to this folder"
    )


def publish(
    folder: Path | None, name: str, text: str, picture: str = "", draw: Callable[[Path], None] | None = None
) -> None:
    """Print a result; if there is a folder, write it there, and draw the picture that belongs to it.

    Args:
        picture: what ``draw`` draws, to the path that it is called with.
    """
    print(text)
    if folder and draw:
        text = f"{text.rstrip()}\n\n![{picture}]({name}.png)"
    if folder:
        write_result(folder, name, text)
    if folder and draw:
        draw(folder / f"{name}.png")


def pyplot() -> Any:
    """Return matplotlib's pyplot, which draws to files alone."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def write_result(folder: Path, name: str, text: str) -> None:
    """Write a result, markdown, to a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(f"{text}\n")


def gpu() -> str:
    """GPU, its memory, driver, CUDA; of the first one."""
    if not torch.cuda.is_available():
        return "no GPU"
    properties = torch.cuda.get_device_properties(0)
    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+(\.\d+)+", version.read_text()) if version.exists() else None
    driver = f"driver {found[0] if found else 'unknown'}"
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB; {driver}; CUDA {torch.version.cuda}"
