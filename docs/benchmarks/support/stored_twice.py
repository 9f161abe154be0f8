"""What a redo log costs at least: the kernel's own steps in registers, with every result stored twice, and no log."""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from zero_opt import _native

ROOT = Path(__file__).resolve().parents[3]
# As in setup.py.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
ISA_FLAGS = {
    "v3": ["-march=x86-64-v3", "-mprefer-vector-width=256"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}


def stored_twice(threads: int) -> Callable[[Mapping[str, Tensor]], None] | None:
    """A step of arrays in place; None without a compiler, or without such steps on this processor.

    It takes tensors by role: param, exp_avg and exp_avg_sq in fp32; grad in fp32, or in bf16, and out likewise.
    """
    compiler = (sysconfig.get_config_var("CXX") or "c++").split()[0]
    if _native.isa() not in ISA_FLAGS:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stored_twice.so"
        sources = [Path(__file__).with_suffix(".cpp"), ROOT / "native" / "threads" / "thread_pool.cpp"]
        command = [compiler, *FLAGS, *ISA_FLAGS[_native.isa()], "-pthread", f"-I{ROOT / 'native'}", "-w"]
        try:
            subprocess.run([*command, *map(str, sources), "-o", str(library)], check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        step = ctypes.CDLL(str(library)).stored_twice
    step.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64, ctypes.c_int]
    step.restype = None

    def call(tensors: Mapping[str, Tensor]) -> None:
        numel = tensors["param"].numel()
        places = [tensors[role].data_ptr() for role in ("param", "exp_avg", "exp_avg_sq", "grad")]
        step(*places, tensors["out"].data_ptr() if "out" in tensors else None, numel, threads)

    return call
