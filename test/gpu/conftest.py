"""Every test of this folder needs a GPU; without one all are skipped, and one line says why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Tests fork. Asking the driver whether there is a GPU would make CUDA unusable in the children; NVML is asked instead.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest
import torch

FOLDER = Path(__file__).parent


def why_not() -> str | None:
    """Return why nothing here can run, or None."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for the CPU alone"
    return f"torch {torch.__version__} sees no GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run. Warnings are not errors here: torch has some on GPUs that nobody has seen yet."""
    reason = why_not()
    for item in items:
        if str(item.path).startswith(f"{FOLDER}/"):  # of ten thousand: no Path is made
            item.add_marker(pytest.mark.filterwarnings("default"))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say once why tests of this folder were skipped."""
    reason = why_not()
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "test/gpu/" in report.nodeid]
    if reason is not None and skipped:
        terminalreporter.write_line(f"test/gpu: all {len(skipped)} tests are skipped, no GPU: {reason}")
