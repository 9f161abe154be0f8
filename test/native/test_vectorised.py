"""The compiler turns every loop marked ``// vectorise`` into vector instructions, on every instruction set."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
VECTOR_BYTES = {"baseline": 16, "v3": 32, "v4": 64}
CROSS = "aarch64-linux-gnu-g++"


def settings_of_the_build() -> dict[str, Any]:
    """The constants in setup.py, which cannot be imported without building."""
    found: dict[str, Any] = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


BUILD = settings_of_the_build()


def compiler() -> list[str]:
    """The C++ compiler that builds the extension."""
    command = shlex.split(str(sysconfig.get_config_var("CXX") or "c++"))
    return command if shutil.which(command[0]) else [shutil.which("g++") or shutil.which("c++") or "clang++"]


def marked_loops() -> set[tuple[str, int]]:
    """(file, line) of every loop that carries the mark."""
    return {
        (path.name, number)
        for path in NATIVE.glob("*/*.inl")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.rstrip().endswith("// vectorise")
    }


def vectorised_loops(isa: str, *extra: str) -> dict[tuple[str, int], set[int]]:
    """(file, line) of every loop that the compiler says it vectorised, and the bytes of a vector."""
    flags = [*BUILD["CXX"], *BUILD["EXACT_MATHS"], *BUILD["ISA_FLAGS"][isa], *extra]
    clang = "clang" in subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    report = "-Rpass=loop-vectorize" if clang else "-fopt-info-vec-optimized"
    source = NATIVE / "kernels" / f"isa_{isa}.cpp"
    command = [*compiler(), *flags, report, f"-I{NATIVE}", "-fPIC", "-S", "-o", "/dev/null", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pattern = (
        r"(\w+\.inl):(\d+):\d+: .*(?:loop vectorized using (\d+) byte|vectorized loop \(vectorization width: (\d+))"
    )
    found: dict[tuple[str, int], set[int]] = {}
    for name, line, width, lanes in re.findall(pattern, done.stderr):
        found.setdefault((name, int(line)), set()).add(int(width) if width else 4 * int(lanes))
    return found


def isas() -> list[str]:
    x86_64 = sysconfig.get_platform().endswith(("x86_64", "amd64"))
    return list(BUILD["ISA_FLAGS"]) if x86_64 else ["baseline"]


@pytest.mark.parametrize("isa", isas())
def test_every_marked_loop_is_vectorised(isa: str) -> None:
    found = vectorised_loops(isa)
    missing = sorted(marked_loops() - found.keys())
    assert not missing, f"not vectorised for {isa}: {missing}"
    narrow = {loop: found[loop] for loop in marked_loops() if max(found[loop]) < VECTOR_BYTES[isa]}
    assert not narrow, f"vectors narrower than {VECTOR_BYTES[isa]} bytes for {isa}: {narrow}"


def test_a_compiler_that_does_not_vectorise_is_noticed() -> None:
    assert marked_loops() - vectorised_loops("baseline", "-fno-tree-vectorize").keys() == marked_loops() != set()


def cross_compiler() -> list[str]:
    """A C++ compiler for aarch64 Linux; empty if there is none."""
    if shutil.which(CROSS):
        return [CROSS]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    return []


@pytest.mark.skipif(not cross_compiler(), reason=f"neither {CROSS} nor ziglang")
def test_everything_but_the_bindings_compiles_for_aarch64(tmp_path: Path) -> None:
    flags = [*BUILD["CXX"], *BUILD["EXACT_MATHS"], "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC"]
    own = [path for path in NATIVE.glob("*/*.cpp") if path.parent.name != "bindings"]
    sources = [path for path in own if path.stem not in ("isa_v3", "isa_v4")]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path), "ZIG_LOCAL_CACHE_DIR": str(tmp_path)}
    for source in sources:
        command = [*cross_compiler(), *flags, f"-I{NATIVE}", "-c", str(source)]
        subprocess.run([*command, "-o", str(tmp_path / f"{source.stem}.o")], check=True, env={**os.environ, **caches})
    assert {path.stem for path in tmp_path.glob("*.o")} >= {"isa_baseline", "step", "thread_pool", "dispatch"}
