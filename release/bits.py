"""Digests of what the native kernels compute, by instruction set: ``python bits.py EXTENSION``, in any environment.

Two builds of the extension, by any compilers and for any machines, print the same digests. Torch is not imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import sys
from array import array
from collections.abc import Mapping
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

NUMEL = 4001
BLOCK = 64
STEPS = 3
HYPERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
# What the array module calls an element of a dtype.
CODES = {"float32": "f", "float16": "H", "bfloat16": "H", "uint8": "B", "int16": "h"}
# dtypes of gradient, moments and output, and whether the master is split.
FORMS = (
    ("float32", "float32", "", False),
    ("float16", "float32", "float32", False),
    ("bfloat16", "float32", "bfloat16", False),
    ("float16", "float32", "float16", False),
    ("bfloat16", "float32", "", True),
    ("float32", "bfloat16", "bfloat16", False),
    ("bfloat16", "uint8", "bfloat16", False),
    ("bfloat16", "uint8", "", True),
)


def loaded(path: str) -> Any:
    """Return the extension in this file."""
    spec = spec_from_loader("zero_opt._native", ExtensionFileLoader("zero_opt._native", path))
    assert spec is not None
    assert spec.loader is not None
    native = module_from_spec(spec)
    spec.loader.exec_module(native)
    return native


def numbers(seed: int, *, positive: bool = False) -> array[float]:
    """Return fp32 numbers of many magnitudes, subnormal ones included."""
    draw = random.Random(seed)
    found = array("f", (math.ldexp(draw.uniform(-1, 1), draw.randint(-148, 27)) for _ in range(NUMEL)))
    return array("f", map(abs, found)) if positive else found


def narrowed(values: array[float], dtype: str) -> array[Any]:
    """Return the values in a dtype; what is too large for fp16 is made small."""
    if dtype == "bfloat16":
        return array("H", (bits >> 16 for bits in struct.unpack(f"{NUMEL}I", values.tobytes())))
    if dtype == "float16":
        small = (value if abs(value) < 6e4 else 1.0 for value in values)
        return array("H", struct.pack(f"{NUMEL}e", *small))
    return values


def zeros(dtype: str, numel: int = NUMEL) -> array[Any]:
    """Return an array of zeros."""
    code = CODES[dtype]
    return array(code, bytes(numel * array(code).itemsize))


def addresses(arrays: Mapping[str, array[Any]]) -> dict[str, int]:
    """Return where arrays lie, by role."""
    return {role: values.buffer_info()[0] for role, values in arrays.items()}


def state(native: Any, moments: str, out: str, split: bool, isa: str) -> dict[str, array[Any]]:
    """Return the arrays that a step writes, by role."""
    written: dict[str, array[Any]] = {"exp_avg": numbers(2), "exp_avg_sq": numbers(3, positive=True)}
    written["param"] = narrowed(numbers(1), "bfloat16" if split else "float32")
    if moments != "float32":
        plain = {f"plain_{role}": written[role] for role in ("exp_avg", "exp_avg_sq")}
        written |= {role: zeros(moments) for role in ("exp_avg", "exp_avg_sq")}
        if moments == "uint8":
            written |= {f"{role}_base": zeros("int16", -(-NUMEL // BLOCK)) for role in ("exp_avg", "exp_avg_sq")}
        compact = {role: values for role, values in written.items() if role != "param"}
        native.pack_moments(native.MomentRun(NUMEL, moments, addresses(compact | plain), step=1.0), isa)
    if split:
        written["remainder"] = array("h", (index % 65536 - 32768 for index in range(NUMEL)))
    if out:
        written["out"] = zeros(out)
    return written


def step_bits(native: Any, isa: str) -> bytes:
    """Return what a few steps write, over all forms of the state."""
    digest = hashlib.sha256()
    for gradient, moments, out, split in FORMS:
        for decoupled in (True, False):
            written = state(native, moments, out, split, isa)
            hypers = native.Hypers("adam", **HYPERS, decoupled=decoupled, maximize=not decoupled, grad_scale=0.37)
            dtypes = {"grad_dtype": gradient, "moment_dtype": moments, "out_dtype": out or "float32"}
            for number in range(1, STEPS + 1):
                grad = narrowed(numbers(10 + number), gradient)
                run = native.UpdateRun(NUMEL, addresses(written), step=float(number), **dtypes)
                wrong = native.update_step([(hypers, [run], [grad.buffer_info()[0]])], isa=isa)
                digest.update(str(wrong).encode())
            for role in sorted(written):
                digest.update(written[role].tobytes())
    return digest.digest()


def other_bits(native: Any, isa: str) -> bytes:
    """Return what multiply-add, sums and conversions give."""
    a, b, c = (numbers(seed) for seed in (4, 5, 6))
    out = zeros("float32")
    native.fma(NUMEL, *(values.buffer_info()[0] for values in (a, b, c, out)), isa)
    sums = native.grad_sum([(values.buffer_info()[0], "float32", NUMEL) for values in (a, b)], isa=isa)
    found = out.tobytes() + repr(sums).encode()
    for dtype in ("bfloat16", "float16"):
        half = zeros(dtype)
        native.convert(NUMEL, (a.buffer_info()[0], "float32"), (half.buffer_info()[0], dtype), isa)
        found += half.tobytes()
    return found


def main(extension: str) -> None:
    """Print the digests as JSON."""
    native = loaded(extension)
    found = {isa: hashlib.sha256(step_bits(native, isa) + other_bits(native, isa)).hexdigest() for isa in native.isas()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
