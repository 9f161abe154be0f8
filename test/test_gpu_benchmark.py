"""The benchmark for GPUs runs from end to end on the CPU, with a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "gpu.py"
SECONDS = 240


def smoke(*options: str) -> list[str]:
    command = [sys.executable, str(SCRIPT), "--smoke", "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
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


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_curves_agree(dtype: str) -> None:
    lines = smoke("--convergence", "--steps", "4", "--dtypes", dtype)
    (differences,) = (line.split("|")[2:-1] for line in lines if "largest difference" in line)
    assert len(differences) == 4
    assert max(map(float, differences)) < 0.01
