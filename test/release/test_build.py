"""The sdist, and how zig is called."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

from release import audit, build, pythons, zig

TIME = 1_700_000_000


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.build_sdist(tmp_path_factory.mktemp("sdist"), TIME)


def test_the_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    assert list(audit.sdist_findings(sdist)) == []


def test_the_sdist_of_equal_sources_is_the_same_to_the_byte(sdist: Path, tmp_path: Path) -> None:
    assert build.build_sdist(tmp_path, TIME).read_bytes() == sdist.read_bytes()


def test_files_have_the_time_that_is_asked_for(sdist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(sdist) as archive:
        assert {member.mtime for member in archive.getmembers()} == {TIME}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "17")
    assert build.epoch() == 17
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert build.epoch() > TIME


def test_a_wheel_of_equal_sources_is_the_same_to_the_byte(sdist: Path, tmp_path: Path) -> None:
    settings = {**build.cross_settings("3.11", "aarch64", TIME), "ZERO_OPT_NATIVE": "skip"}
    wheels = []
    for name in ("one", "two"):
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path / name, filter="data")
        (sources,) = (tmp_path / name).iterdir()
        build.build_wheel(Path(sys.executable), sources, tmp_path / name, settings)
        (wheel,) = (tmp_path / name).glob("*manylinux_2_28_aarch64.whl")
        wheels.append(wheel.read_bytes())
    assert wheels[0] == wheels[1]


def test_zig_is_told_the_target_and_the_levels_of_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(zig.os, "execv", lambda _, command: called.append(command))
    zig.main("x86_64-linux-gnu.2.28", "c++", "-march=x86-64-v3", "-c", "a.cpp")
    zig.main("x86_64-linux-gnu.2.28", "ar", "rcs", "a.a")
    compiler = ["c++", "-target", "x86_64-linux-gnu.2.28", "-march=x86_64_v3", "-c", "a.cpp"]
    assert [command[3:] for command in called] == [compiler, ["ar", "rcs", "a.a"]]


def test_pythons_without_headers_are_passed_over(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    assert not pythons.usable(bare)
    assert pythons.usable(Path(sys.executable))
