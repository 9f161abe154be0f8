"""Build the sdist, and from it a wheel for every CPython of this machine and every processor.

    python -m release.build FOLDER

zig compiles for an older glibc than this machine's, and for processors other than its own. Equal sources give
equal files: their times are SOURCE_DATE_EPOCH, or that of the last commit.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .pythons import ROOT, environment, found_pythons

MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)
BUILDERS = ("setuptools", "wheel", "pybind11")
_ZIG = Path(__file__).resolve().parent / "zig.py"
_WORK = ROOT / "build" / "release"


def epoch() -> int:
    """Return the time that all files are given."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None:
        command = ["git", "log", "-1", "--format=%ct"]
        given = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
    return int(given)


def tracked() -> set[str]:
    """Return the files of the repository."""
    command = ["git", "ls-files"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    return set(done.stdout.splitlines())


def plain_sdist(made: Path, target: Path, time: int) -> None:
    """Write an sdist anew, without what differs from one run to the next: times, owners and order."""
    with tarfile.open(made) as source, tempfile.TemporaryFile() as plain:
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for member in sorted(source.getmembers(), key=lambda member: member.name):
                entry = tarfile.TarInfo(member.name)
                entry.size, entry.type, entry.mtime = member.size, member.type, time
                entry.mode = 0o755 if member.mode & 0o100 else 0o644
                archive.addfile(entry, source.extractfile(member) if member.isfile() else None)
        plain.seek(0)
        with target.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=time) as compressed:
            shutil.copyfileobj(plain, compressed)


def build_sdist(folder: Path, time: int) -> Path:
    """Return the sdist of the repository's files as they are in the working tree."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in tracked():
            copy = Path(scratch, "tree", name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy)
        command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", scratch, "sdist", "--dist-dir", scratch]
        settings = {**os.environ, "ZERO_OPT_NATIVE": "skip"}
        subprocess.run(command, cwd=Path(scratch, "tree"), check=True, timeout=600, env=settings)
        (made,) = Path(scratch).glob("*.tar.gz")
        plain_sdist(made, folder / made.name, time)
    return folder / made.name


def cross_settings(version: str, machine: str, time: int) -> Mapping[str, str]:
    """Return the environment variables with which Python's own build tools build for another machine."""
    zig = f"{sys.executable} {_ZIG} {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    cache, flags = str(_WORK / "zig"), "-DNDEBUG -fwrapv -Wall -Wno-unknown-pragmas"
    return {
        "CC": f"{zig} cc",
        "CXX": f"{zig} c++",
        "CFLAGS": flags,
        "CXXFLAGS": flags,
        "LDSHARED": f"{zig} cc -shared",
        "LDCXXSHARED": f"{zig} c++ -shared",
        "AR": f"{zig} ar",
        "ZIG_GLOBAL_CACHE_DIR": cache,
        "ZIG_LOCAL_CACHE_DIR": cache,
        "ZERO_OPT_NATIVE": "require",
        "SOURCE_DATE_EPOCH": str(time),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version.replace('.', '')}-{machine}-linux-gnu.so",
    }


def build_wheel(python: Path, sources: Path, folder: Path, settings: Mapping[str, str]) -> None:
    """Build the wheel of unpacked sources; the kernels know no Python, and are compiled for the first one only."""
    tag = "manylinux_{}_{}_{}".format(*GLIBC, settings["_PYTHON_HOST_PLATFORM"].partition("-")[2])
    command = [str(python), "setup.py", "-q", "build_clib", "--build-clib", "build/kernels", "--build-temp", "build"]
    command += ["bdist_wheel", "--plat-name", tag, "--dist-dir", str(folder)]
    subprocess.run(command, cwd=sources, check=True, timeout=7200, env={**os.environ, **settings})


def build_machine(machine: str, builders: Mapping[str, Path], sdist: Path, time: int) -> None:
    """Build the wheels for a machine beside the sdist."""
    scratch = _WORK / machine
    shutil.rmtree(scratch, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    sources = scratch / sdist.name.removesuffix(".tar.gz")
    for version, python in builders.items():
        print(f"== wheel for CPython {version}, {machine}", flush=True)
        build_wheel(python, sources, sdist.parent, cross_settings(version, machine, time))


def main(target: str) -> None:
    """Build everything into a folder, in place of what was there."""
    folder, time = Path(target).resolve(), epoch()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sdist = build_sdist(folder, time)
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    builders = {
        version: environment(python, _WORK / f"builder-{version}", BUILDERS, options=pins)
        for version, python in found_pythons().items()
    }
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for built in [threads.submit(build_machine, machine, builders, sdist, time) for machine in MACHINES]:
            built.result()


if __name__ == "__main__":
    main(*sys.argv[1:])
