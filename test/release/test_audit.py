"""The audit finds what it looks for."""

from __future__ import annotations

import platform
import subprocess
import sysconfig
from pathlib import Path

import pytest

from release import audit

MACHINE = platform.machine()
GOOD = 'extern "C" __attribute__((visibility("default"))) void* PyInit__native() { return nullptr; }\n'
pytestmark = pytest.mark.skipif(MACHINE not in audit.MACHINES, reason="wheels are for other machines")


def findings(folder: Path, source: str, *flags: str) -> list[str]:
    """What is wrong with a library of this source."""
    (folder / "a.cpp").write_text(source)
    compiler = str(sysconfig.get_config_var("CXX") or "c++").split()[0]
    command = [compiler, "-shared", "-fPIC", "-fvisibility=hidden", "-nostdlib", "-s", *flags, "a.cpp", "-o", "a.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return list(audit.extension_findings((folder / "a.so").read_bytes(), MACHINE))


def test_a_good_extension_passes(tmp_path: Path) -> None:
    assert findings(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("source", "flags", "finding"),
    [
        (f'{GOOD}extern "C" __attribute__((visibility("default"))) int other() {{ return 0; }}', [], "exports other"),
        (GOOD, ["-Wl,-rpath,/somewhere"], "has a DT_RUNPATH"),
        (GOOD, ["-Wl,-z,execstack"], "has an executable stack"),
        (GOOD, ["-Wl,--no-as-needed", "-lstdc++"], "needs libstdc++.so.6"),
    ],
)
def test_a_fault_of_an_extension_is_found(tmp_path: Path, source: str, flags: list[str], finding: str) -> None:
    assert findings(tmp_path, source, "-Wl,--enable-new-dtags", *flags) == [finding]


def test_debug_information_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(GOOD)
    subprocess.run(["c++", "-g", "-shared", "-fPIC", "-nostdlib", "a.cpp", "-o", "a.so"], cwd=tmp_path, check=True)
    found = list(audit.extension_findings((tmp_path / "a.so").read_bytes(), MACHINE))
    assert {"has .symtab: not stripped", "has .debug_info: not stripped"} <= set(found)


def test_another_machines_extension_is_found(tmp_path: Path) -> None:
    findings(tmp_path, GOOD)
    (other,) = set(audit.MACHINES) - {MACHINE}
    assert list(audit.extension_findings((tmp_path / "a.so").read_bytes(), other))


@pytest.mark.parametrize(
    ("version", "good"),
    [("GLIBC_2.2.5", True), ("GLIBC_2.28", True), ("GLIBC_2.29", False), ("GLIBCXX_3.4", False), ("GCC_3.0", False)],
)
def test_versions_of_symbols_are_read(version: str, good: bool) -> None:
    assert audit.of_glibc(version) is good


def test_metadata_that_lack_something_are_found() -> None:
    found = list(audit.metadata_findings("Metadata-Version: 2.4\nSummary: x\n\n[a](docs/a.md) [b](#b) [c](https://c)"))
    assert found[:2] == ["has no Author", "has no Keywords"]
    assert found[-1] == "has a relative link in its description: ](docs/a.md)"
