"""The benchmark for GPUs runs from end to end on the CPU, with a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from test.support.failures import PATIENCE_S

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "gpu.py"


def smoke(*options: str) -> list[str]:
    command = [sys.executable, str(SCRIPT), "--smoke", "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_rows() -> None:
    *_, masters, worker, absent = smoke("--all", "--rows", "torch", "worker", "torchao")
    for row, label in ((masters, "torch AdamW"), (worker, "`WorkerOffload()`")):
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert len(cells) == 9
        assert cells[0].startswith(label)
        assert float(cells[2]) > 0
    assert "torchao" in absent
    assert absent.count("|") == 10


def test_curves_agree() -> None:
    lines = smoke("--convergence", "--steps", "3")
    found = [line.split("|")[2:-1] for line in lines if "largest difference" in line]
    assert [len(differences) for differences in found] == [4, 4]
    assert max(float(cell) for differences in found for cell in differences) < 0.01
