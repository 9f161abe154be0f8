"""The native code under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer: make sanitize."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test.support.failures import PATIENCE_S
from zero_opt.kernels.table import UPDATES

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitize"
STEPPED = sorted({update.name for update in UPDATES.values()})
# The trainer's side with the word that publishes a step ordering nothing.
PUBLISHED = "block.submitted.store(sequence + 1, std::memory_order_release);"
UNORDERED = PUBLISHED.replace("release", "relaxed")


def built(folder: str, program: str, sanitizers: str, mutant: Path | None = None) -> Path:
    command = [sys.executable, "-m", "test.sanitize.build", str(BUILD / folder), program, sanitizers]
    command += [str(mutant)] if mutant else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return BUILD / folder / "program"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the randomisation of addresses, which older sanitizers cannot live with."""
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = ["setarch", "-R", str(program), *arguments]
    return subprocess.run(
        command, env={**os.environ, **options}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_no_access_is_out_of_bounds_and_nothing_undefined() -> None:
    done = run(built("memory", "memory", "address,undefined"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    print(f"\naddress,undefined: {done.stdout.strip()}")


@pytest.mark.parametrize("what", [*STEPPED, "exchange"])
def test_no_two_sides_race(what: str) -> None:
    done = run(built("race", "race", "thread"), what)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    print(f"\nthread: {done.stdout.strip()}")


@pytest.mark.parametrize("update", STEPPED)
def test_a_race_is_noticed(update: str) -> None:
    folder = BUILD / "unordered"
    folder.mkdir(parents=True, exist_ok=True)
    text = (ROOT / "native" / "worker" / "control.cpp").read_text()
    assert text.count(PUBLISHED) == 1
    mutant = folder / "control_unordered.cpp"
    if not mutant.exists() or mutant.read_text() != text.replace(PUBLISHED, UNORDERED):
        mutant.write_text(text.replace(PUBLISHED, UNORDERED))
    done = run(built("unordered", "race", "thread", mutant), update)
    assert done.returncode != 0
    assert "data race" in done.stderr
