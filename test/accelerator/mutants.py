"""Variants of the library in which one wait, event or lock is missing, each of which a case has to notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from test.accelerator.runner import Plan, wrong_lines

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "zero_opt"
SECONDS = 90  # of one case on a mutant


@dataclass(frozen=True)
class Mutant:
    """The shipped package with some of its text replaced.

    Attributes:
        name: what is wrong.
        file: below the package. replacements: texts and what comes in their place.
        case: the smallest one that notices. world_size, place: where it runs; the place is a pattern.
        lock: whether what is missing is a lock: its absence needs luck to show, and may show as an error.
    """

    name: str
    file: str
    replacements: tuple[tuple[str, str], ...]
    case: str
    world_size: int = 1
    place: str = ""
    lock: bool = False

    @property
    def plan(self) -> Plan:
        """What runs: without any delay, so that races alone notice; the absence of a lock with 20 seeds of delays."""
        return Plan((self.case,), tuple(range(20)) if self.lock else (None,), 1, self.place)

    def applied(self, source: str) -> str:
        """Return the mutated source. Raises ValueError unless every text is there exactly once."""
        for old, new in self.replacements:
            if source.count(old) != 1:
                raise ValueError(f"mutant {self.name!r} does not apply: {source.count(old)} times {old!r}")
            source = source.replace(old, new)
        return source

    def copied_to(self, folder: Path) -> None:
        """Copy the package, mutated, into a folder."""
        shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / PACKAGE / self.file
        path.write_text(self.applied(path.read_text()))


def noticed(mutant: Mutant, folder: Path) -> list[str]:
    """Run a mutant's case in a process of its own, with the package in ``folder``; return what is wrong."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "test.accelerator.mutants", str(folder), str(MUTANTS.index(mutant))]
    # The folder comes first in sys.path, being the working directory.
    found = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * SECONDS, check=False
    )
    assert found.returncode == 0, found.stderr
    lines: list[str] = json.loads(found.stdout.splitlines()[-1])
    return lines


def _main(folder: str, index: str) -> None:
    import zero_opt

    assert Path(zero_opt.__file__).is_relative_to(folder), zero_opt.__file__
    mutant = MUTANTS[int(index)]
    try:
        lines = wrong_lines(mutant.world_size, mutant.plan, timeout=SECONDS)[mutant.case]
    except Exception as error:
        lines = ["error: " + line for line in traceback.format_exception_only(error)]
    print(json.dumps(lines))


MUTANTS: tuple[Mutant, ...] = ()

if __name__ == "__main__":
    _main(*sys.argv[1:])
