"""The steps of a release that come before it is built."""

from __future__ import annotations

import datetime
import hashlib
import re
import shutil
from pathlib import Path

import pytest

import release.__main__ as steps
import zero_opt

ROOT = Path(__file__).resolve().parents[2]
DAY = datetime.date(2030, 1, 2)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the first steps read and write."""
    (tmp_path / "zero_opt").mkdir()
    for name in ("zero_opt/__init__.py", "CHANGELOG.md", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_changelog_begins_with_the_version_of_the_tree() -> None:
    first = re.search(r"^## (\S+) - (unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == zero_opt.__version__


def test_version_and_day_are_set_once(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 - unreleased\n\n### Added\n\n## 0.0.1 - 2029-01-01\n")
    assert steps.stamp(tree, "0.2.0", DAY) == [tree / "zero_opt" / "__init__.py", tree / "CHANGELOG.md"]
    assert '\n__version__ = "0.2.0"\n' in (tree / "zero_opt" / "__init__.py").read_text()
    headings = re.findall("^## .*", (tree / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings == ["## 0.2.0 - 2030-01-02", "## 0.0.1 - 2029-01-01"]
    assert steps.stamp(tree, "0.2.0", DAY + datetime.timedelta(days=1)) == []


def test_a_changelog_of_another_version_stops_the_release(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 - 2029-01-01\n")
    with pytest.raises(steps.NotReadyError, match=r"CHANGELOG.md does not begin with a section of 0\.2\.0"):
        steps.stamp(tree, "0.2.0", DAY)


def test_a_repository_that_is_nowhere_stops_the_release(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tree / "setup.cfg"
    settings.write_text(re.sub("^url = .*", "url = https://a.invalid/a", settings.read_text(), flags=re.MULTILINE))
    monkeypatch.setattr(steps, "ROOT", tree)
    with pytest.raises(steps.NotReadyError, match=r"set url in setup.cfg .*: https://a\.invalid/a is nowhere"):
        steps.check_tree("0.1.0")


def test_sums_are_those_of_all_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed: list[list[str]] = []
    monkeypatch.setattr(steps.subprocess, "run", lambda command, **_: signed.append(command))
    for name in ("b.whl", "a.tar.gz", "other"):
        (tmp_path / name).write_text(name)
    steps.sign(tmp_path)
    lines = [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}" for name in ("a.tar.gz", "b.whl")]
    assert (tmp_path / steps.SUMS).read_text().splitlines() == lines
    assert signed == [["gpg", "--yes", "--armor", "--detach-sign", str(tmp_path / steps.SUMS)]]
