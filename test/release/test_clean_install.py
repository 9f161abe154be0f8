"""What is installed beside a wheel that is tried."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from release import clean_install


def test_the_native_tests_take_the_torch_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zero_opt-0.1.0" / "zero_opt").mkdir(parents=True)
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "zero_opt-0.1.0", "zero_opt-0.1.0")
    commands: list[list[str]] = []
    monkeypatch.setattr(clean_install.subprocess, "run", lambda command, **_: commands.append(command))
    clean_install.native_tests(Path("python"), tmp_path / "sdist.tar.gz")
    install, _ = commands
    # constraints.txt names one torch, so pip refuses every other beside it.
    assert not [argument for argument in install if argument.startswith("torch")]
    assert set(clean_install.TESTERS) <= set(install)
