"""The digests that builds of the extension are compared by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from release import bits
from zero_opt.system.extension import native


def test_every_instruction_set_has_the_same_digest() -> None:
    command = [sys.executable, "-I", "-S", bits.__file__, str(native.__file__)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)
    assert list(found) == native.isas()
    assert len(set(found.values())) == 1


def test_another_step_has_another_digest() -> None:
    written = bits.state(native, "bfloat16", "bfloat16", split=False, isa="")
    before = {role: values.tobytes() for role, values in written.items()}
    assert bits.state(native, "bfloat16", "bfloat16", split=False, isa="")["exp_avg"].tobytes() == before["exp_avg"]
    run = native.UpdateRun(bits.NUMEL, bits.addresses(written), moment_dtype="bfloat16", out_dtype="bfloat16")
    hypers = native.Hypers("adam", **bits.HYPERS, decoupled=True, maximize=False)
    native.update_step([(hypers, [run], [bits.numbers(1).buffer_info()[0]])])
    assert all(values.tobytes() != before[role] for role, values in written.items())


def test_bits_are_found_where_nothing_is_installed() -> None:
    imports = [line for line in Path(bits.__file__).read_text().splitlines() if line.startswith(("import", "from"))]
    modules = {line.split()[1].partition(".")[0] for line in imports}
    assert modules <= sys.stdlib_module_names
