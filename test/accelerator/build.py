"""The build of the simulated accelerator's extension module, once per torch version and content of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import torch

_HERE = Path(__file__).parent
_BUILDS = _HERE.parent.parent / "build" / "accelerator"
_RETRY_S = 600  # a full disk, or memory, may have been the reason
_NAME = "simulated_accelerator"
_FLAGS = [
    "-std=c++20",
    "-O1",
    "-g0",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unused",
    "-DNDEBUG",
]


class Unavailable(Exception):
    """A reason, in one line, why this machine cannot simulate an accelerator."""


def load() -> ModuleType:
    """Build the extension module unless that is done, and load it."""
    library = _built()
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, RuntimeError) as exc:
        raise Unavailable(f"the simulated accelerator does not load: {_line(str(exc))}") from exc
    return module


def _built() -> Path:
    folder = _BUILDS / _digest()
    library = folder / f"{_NAME}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    # Test workers begin together: one of them compiles, the others wait for it.
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        failure = folder / "failure"
        if failure.exists() and time.time() - failure.stat().st_mtime < _RETRY_S:
            raise Unavailable(failure.read_text())
        if not library.exists():
            # A process may be killed while the compiler writes: nobody loads half a file.
            unfinished = folder / f"{_NAME}.{os.getpid()}.tmp"
            try:
                _compile(unfinished)
            except Unavailable as exc:
                failure.write_text(str(exc))
                raise
            os.replace(unfinished, library)
    return library


def _digest() -> str:
    parts = [torch.__version__, sysconfig.get_python_version(), _compiler() or "", *_FLAGS]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.hpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compile(to: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise Unavailable("the simulated accelerator needs a C++ compiler: there is none")
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    command = [
        compiler,
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        # torch's headers are not ours to mend: no warnings of theirs.
        *(flag for folder in _include_folders(torch_folder) for flag in ("-isystem", str(folder))),
        str(_HERE / "sim.cpp"),
        *("-o", str(to)),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as exc:
        raise Unavailable(f"the simulated accelerator does not compile: {exc}") from exc
    if done.returncode:
        to.unlink(missing_ok=True)
        (to.parent / "errors.txt").write_text(done.stderr)
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise Unavailable(
            f"the simulated accelerator does not compile with torch {torch.__version__}: {_line(errors[0])}"
            f" (all errors: {to.parent / 'errors.txt'})"
        )


def _include_folders(torch_folder: Path) -> list[Path]:
    include = torch_folder / "include"
    return [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
