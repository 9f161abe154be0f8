"""The code of the guides, and a program under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def snippets(guide: str) -> list[str]:
    """The Python blocks of a guide, padded so that errors give the guide's line numbers."""
    text = (DOCS / guide).read_text()
    return [
        "\n" * text[: m.start(1)].count("\n") + m[1] for m in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    ]


def anchors(page: Path) -> set[str]:
    """Return what links to a page can name: its headings, as they are spelt in addresses."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def run_under_torchrun(program: str, folder: Path, ranks: int, timeout_s: float) -> None:
    """Run a program in a folder, as torchrun starts it on one host.

    Raises:
        AssertionError: it has failed, with what it has written to stderr.
    """
    file = folder / "program.py"
    file.write_text(program)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ended = subprocess.run(
        [sys.executable, *launcher, str(file)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(DOCS.parent)},
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
