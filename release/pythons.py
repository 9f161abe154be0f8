"""The CPythons of this machine, and environments of their own for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
# Fails in a Python that no extension is compiled for.
_PROGRAM = """
import pathlib, sys, sysconfig
assert sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
"""


def candidates(version: str) -> list[Path]:
    """Return where a version of Python may be: on PATH, or installed by pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")
    on_path = shutil.which(f"python{version}")
    return [*sorted(pyenv), *([Path(on_path)] if on_path else [])]


def usable(python: Path) -> bool:
    """Return whether this is a CPython with headers."""
    command = [str(python), "-I", "-c", _PROGRAM]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def found_pythons() -> dict[str, Path]:
    """Return the first usable CPython of each version."""
    usable_ones = {version: [*filter(usable, candidates(version))] for version in VERSIONS}
    return {version: pythons[0] for version, pythons in usable_ones.items() if pythons}


def environment(python: Path, folder: Path, packages: Sequence[str], options: Sequence[str] = ()) -> Path:
    """Return the Python of a new environment with these packages. ``options`` are pip's."""
    subprocess.run([str(python), "-m", "venv", "--clear", str(folder)], check=True, timeout=300)
    inside = folder / "bin" / "python"
    command = [str(inside), "-m", "pip", "install", "--quiet", *options, *packages]
    subprocess.run(command, check=True, timeout=3600)
    return inside
