"""What runs elsewhere: the workflow tries what the metadata promise, and templates ask for what is needed."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOW = (GITHUB / "workflows" / "ci.yml").read_text("utf-8")
TEMPLATES = sorted([*(GITHUB / "ISSUE_TEMPLATE").iterdir(), GITHUB / "PULL_REQUEST_TEMPLATE.md"])


def _matrix(axis: str) -> list[str]:
    found = re.search(rf"^ +{axis}: \[(.*)\]$", WORKFLOW, re.M)
    assert found is not None
    return re.findall(r'"(.*?)"', found[1])


def test_the_workflow_has_every_python_and_the_oldest_the_pinned_and_the_next_torch() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)$", config["metadata"]["classifiers"], re.M)
    assert _matrix("python") == pythons
    oldest = re.findall(r"torch>=(.*)", config["options"]["install_requires"])[0]
    pinned = re.findall(r"^torch==(.*)", (ROOT / "constraints.txt").read_text("utf-8"), re.M)[0]
    assert _matrix("torch") == [f"{oldest}.0", pinned, "nightly"]


def test_the_workflow_runs_what_decides() -> None:
    assert re.search(r"^ +- run: \.ci/run$", WORKFLOW, re.M)
    assert "continue-on-error: ${{ matrix.torch == 'nightly' }}" in WORKFLOW


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_every_template_asks_what_the_machine_has(template: Path) -> None:
    assert "python -m zero_opt doctor --json" in template.read_text("utf-8")


def test_no_file_names_a_repository() -> None:
    """``url`` in setup.cfg is the only place that does."""
    files = [*GITHUB.rglob("*.*"), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / ".pre-commit-config.yaml"]
    hosts = {host for file in files if file.is_file() for host in re.findall(r"https?://([^/\s]+)", file.read_text())}
    assert hosts == {"download.pytorch.org"}
