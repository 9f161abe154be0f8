"""The programs of this folder: built when out of date, and run."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from test.crash.mutants import Mutant
from test.support.sampling import long_form

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
BUILD = ROOT / "build" / "crash"
# The long form takes minutes: make crash.
LONG = long_form("CRASH")
PATIENCE_S = 1800  # nothing hangs
DIVERGED, CANNOT_TRACE = 1, 4


@functools.cache
def built(program: str) -> Path:
    """A program with the shipped objects."""
    _build(program)
    return BUILD / program


def built_mutant(mutant: Mutant, isa: str) -> Path:
    """The sweep over a wrong variant of the redo log, for one instruction set."""
    built("sweep")
    folder = BUILD / "mutants" / mutant.name.replace(" ", "_")
    text, target = mutant.applied((NATIVE / mutant.file).read_text()), folder / mutant.file
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
    _build("sweep", str(folder), isa)
    return folder / "sweep"


def _build(*arguments: str) -> None:
    command = [sys.executable, "-m", "test.crash.build", str(BUILD), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Counts:
    """Instructions after which a worker was killed, how many different contents of memory that left, failures."""

    points: int
    images: int
    divergent: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.points + other.points, self.images + other.images, self.divergent + other.divergent)


@dataclass(frozen=True)
class Swept:
    """What a sweep has found; ``nested`` counts the deaths of successors. Crashed if it did not come to its end."""

    undisturbed: bool = False
    first: Counts = Counts(0, 0, 0)
    nested: Counts = Counts(0, 0, 0)
    crashed: bool = False
    said: str = ""

    @property
    def right(self) -> bool:
        return self.undisturbed and not (self.crashed or self.first.divergent or self.nested.divergent)


def sweep(program: Path, *arguments: object) -> Swept:
    """Run the sweep; its arguments are described in sweep.cpp. Skips the test where processes cannot be traced."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode == CANNOT_TRACE:
        pytest.skip(done.stderr)
    if done.returncode not in (0, DIVERGED):
        return Swept(crashed=True, said=f"status {done.returncode}: {done.stderr}")
    found = json.loads(done.stdout)
    swept = Swept(found["undisturbed"], Counts(**found["first"]), Counts(**found["nested"]), said=done.stderr)
    assert swept.right == (done.returncode == 0)
    return swept
