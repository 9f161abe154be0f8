"""Which kernels run: the fastest that are compiled in and that the processor runs, whatever compiler built them."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from test.support.sampling import long_form
from zero_opt import _native

NATIVE = Path(__file__).resolve().parents[2] / "native"
# As /proc/cpuinfo names what the levels of the x86-64 psABI need beyond one another.
V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "lahf_lm", "cx16", "popcnt", "sse4_2", "ssse3"}
V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PROGRAM = r"""
#include <cstdio>

#include "kernels/dispatch.hpp"

namespace zero_opt {
extern const Kernels kKernelsBaseline, kKernelsV3, kKernelsV4;
const Kernels kKernelsBaseline = {"baseline"}, kKernelsV3 = {"v3"}, kKernelsV4 = {"v4"};
}  // namespace zero_opt

int main() {
  for (const auto* kernels : zero_opt::available_kernels()) std::printf("%s ", kernels->name);
  std::printf("%s\n", zero_opt::chosen_kernels().name);
}
"""


def runnable() -> list[str]:
    """What the kernel says that the processor runs, and that it saves the registers of."""
    if platform.machine() != "x86_64":
        return ["baseline"]
    info = Path("/proc/cpuinfo").read_text()
    flags = set(next(line for line in info.splitlines() if line.startswith("flags")).split(":")[1].split())
    return ["baseline", *(["v3"] if flags >= V3 else []), *(["v4"] if flags >= V3 | V4 else [])]


def test_the_processor_is_asked() -> None:
    assert _native.processor_isa() == runnable()[-1]
    assert _native.isas() == [isa for isa in _native.compiled_isas() if isa in runnable()]


ZIG = pytest.mark.skipif(
    not long_form("ZIG") or not importlib.util.find_spec("ziglang"),
    reason="builds zig's run-time library first: ZERO_OPT_ZIG=long",
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set")
@pytest.mark.parametrize(
    "compiler",
    [
        # Whose __builtin_cpu_supports() denies everything, as that of zig's run-time library does.
        pytest.param([os.environ.get("CXX", "c++"), "-D__builtin_cpu_supports(name)=0"], id="denied"),
        pytest.param([sys.executable, "-m", "ziglang", "c++"], marks=ZIG, id="zig"),
    ],
)
def test_a_compiler_that_denies_all_instruction_sets_changes_nothing(compiler: list[str], tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-O2", "-Wno-missing-field-initializers", "-DZERO_OPT_X86_ISAS=1", f"-I{NATIVE}"]
    sources = [str(NATIVE / "kernels" / "dispatch.cpp"), str(tmp_path / "main.cpp")]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "cache"), "ZIG_LOCAL_CACHE_DIR": str(tmp_path / "cache")}
    environment = {key: value for key, value in os.environ.items() if key != "ZERO_OPT_ISA"}
    command = [*compiler, *flags, *sources, "-o", str(tmp_path / "main")]
    subprocess.run(command, check=True, env={**environment, **caches}, timeout=1800)
    done = subprocess.run([tmp_path / "main"], check=True, env=environment, timeout=300, capture_output=True, text=True)
    assert done.stdout.split() == [*runnable(), runnable()[-1]]
