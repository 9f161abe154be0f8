"""Install the wheels of this machine where there is nothing else, and try them.

    python -m release.clean_install FOLDER TORCH...

For every CPython and every version of torch: an environment with torch and the wheel alone, in which release/smoke.py
runs. With the first torch, the native tests of the sdist run there too. The kernels of all wheels, those of other
machines too where qemu runs them, must give the bits of the extension that stands in the working tree.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from zero_opt.system.extension import native

from .pythons import ROOT, environment, found_pythons

# What the native tests import.
TESTERS = ("expecttest", "hypothesis", "numpy", "pytest")
# The root of another machine's system, with a Python in usr/bin, in which its wheels run under qemu.
FOREIGN_ROOT = "ZERO_OPT_AARCH64_ROOT"
_RELEASE = Path(__file__).resolve().parent


def alone() -> dict[str, str]:
    """Return the environment variables of a program that finds installed packages only."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def wheel_for(folder: Path, version: str, machine: str) -> Path:
    """Return the wheel for a CPython and a machine."""
    (wheel,) = folder.glob(f"*-cp{version.replace('.', '')}-*_{machine}.whl")
    return wheel


def bits(python: Sequence[str], extension: str) -> dict[str, str]:
    """Return the digests of an extension's results, by instruction set."""
    command = [*python, "-I", "-S", str(_RELEASE / "bits.py"), extension]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600)
    return dict(json.loads(done.stdout))


def compare_bits(python: Sequence[str], wheel: Path) -> None:
    """Compare a wheel's results with those of the extension in the working tree."""
    assert native.__file__ is not None
    wanted = set(bits([sys.executable], native.__file__).values())
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        (extension,) = (name for name in archive.namelist() if name.endswith(".so"))
        found = bits(python, archive.extract(extension, scratch))
    assert wanted == set(found.values()), f"{wheel.name} gives other bits than the working tree"
    print(f"   same bits: {', '.join(found)} of {wheel.name}", flush=True)


def native_tests(python: Path, sdist: Path) -> None:
    """Run the native tests of an sdist, from which the package itself is taken away, beside any torch."""
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *pins, *TESTERS], check=True, timeout=1200)
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        (sources,) = Path(scratch).iterdir()
        shutil.rmtree(sources / "zero_opt")
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "test/native"]
        subprocess.run(command, cwd=sources, check=True, timeout=7200, env=alone())


def main(target: str, *torches: str) -> None:
    """Try all wheels; the first failure ends it."""
    folder, machine = Path(target).resolve(), platform.machine()
    (sdist,) = folder.glob("*.tar.gz")
    for version, found in found_pythons().items():
        wheel = wheel_for(folder, version, machine)
        print(f"== {wheel.name}", flush=True)
        compare_bits([str(found)], wheel)
        for torch in torches:
            with tempfile.TemporaryDirectory() as scratch:
                clean = environment(found, Path(scratch), [f"torch=={torch}", str(wheel)])
                command = [str(clean), str(_RELEASE / "smoke.py")]
                subprocess.run(command, cwd=scratch, check=True, timeout=1800, env=alone())
                if torch == torches[0]:
                    native_tests(clean, sdist)
    if root := os.environ.get(FOREIGN_ROOT):
        for path in sorted(Path(root, "usr/bin").glob("python3.[0-9][0-9]")):
            wheel = wheel_for(folder, path.name.removeprefix("python"), "aarch64")
            compare_bits(["qemu-aarch64", "-L", root, str(path)], wheel)


if __name__ == "__main__":
    main(*sys.argv[1:])
