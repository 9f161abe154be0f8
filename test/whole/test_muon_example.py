"""The guide's program trains, the same model at one rank and at two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "examples" / "muon_adamw.py"
SMALL = ["--steps", "3", "--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--score", "500"]


def bits_of(*command: str) -> tuple[str, float]:
    """Return what the program says first, and the held-out bits per byte."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    found = re.search(r"held-out bits per byte: ([\d.]+); norm of the last gradients: ([\d.]+)", done.stdout)
    assert found and float(found[2]) > 0, done.stdout
    return done.stdout.splitlines()[0], float(found[1])


def test_muon_and_adamw_train_at_one_rank_and_two() -> None:
    said, bits = bits_of(str(SCRIPT), *SMALL, "--batch", "4")
    assert said == "muon+adamw, 1 ranks, 3 steps, seed 0:" and bits < 8
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said, bits = bits_of(*launcher, str(SCRIPT), *SMALL, "--batch", "4")
    assert said == "muon+adamw, 2 ranks, 3 steps, seed 0:" and bits < 8


def test_adamw_alone_ends_elsewhere() -> None:
    _, both = bits_of(str(SCRIPT), *SMALL)
    said, alone = bits_of(str(SCRIPT), *SMALL, "--optimizers", "adamw")
    assert said.startswith("adamw, ") and alone != both
