"""The one door to the native extension."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zero_opt.system.extension import native

# The extension loads before the package does, as it would if it had been built for another version of the package.
STALE = """
import importlib.util, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("zero_opt._native", sys.argv[1])
old = sys.modules["zero_opt._native"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(old)
{edit}

import torch, zero_opt
from zero_opt.system.extension import native_available
from zero_opt.tools import doctor

try:
    zero_opt.CPUAdam([torch.ones(4)])
except zero_opt.NativeUnavailable as error:
    message = str(error)
assert f"{{old.__file__}} is stale" in message and "build it again" in message, message
assert not native_available()
(found,) = doctor._native()
assert found.status == doctor.OFF and found.advice == message, found
"""


@pytest.mark.parametrize("edit", ["old.interface += 1", "vars(old).pop('interface', None)"], ids=["other", "none"])
def test_an_extension_for_other_sources_is_not_used(edit: str) -> None:
    subprocess.run([sys.executable, "-c", STALE.format(edit=edit), str(native.__file__)], check=True, timeout=120)


# A program that was frozen without the stub has nothing to compare with.
NO_STUB = """
from pathlib import Path

real = Path.read_bytes

def missing(path):
    if path.name == "_native.pyi":
        raise FileNotFoundError(path)
    return real(path)

Path.read_bytes = missing
import torch, zero_opt
zero_opt.CPUAdam([torch.ones(4)])
"""


def test_without_the_stub_the_extension_is_used() -> None:
    subprocess.run([sys.executable, "-c", NO_STUB], check=True, timeout=120)


ISA = """
import os, sys
os.environ["ZERO_OPT_ISA"] = sys.argv[1]
import torch, zero_opt
from zero_opt.__main__ import main

try:
    zero_opt.CPUAdam([torch.ones(4)])
except zero_opt.NativeUnavailable as error:
    print(error)
assert main(["doctor"]) == 0
"""


@pytest.mark.parametrize("isa", ["v9", "V3"])
def test_an_unknown_instruction_set_is_named_once(isa: str) -> None:
    done = subprocess.run([sys.executable, "-c", ISA, isa], check=True, timeout=120, capture_output=True, text=True)
    said, *report = done.stdout.splitlines()
    assert said.startswith(f"ZERO_OPT_ISA is {isa!r}; unset it or use one of {', '.join(native.isas())}, ")
    assert [line.strip() for line in report if "ZERO_OPT_ISA" in line] == [f"-> {said}"]
