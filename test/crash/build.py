"""Programs of this folder, linked with the objects that setup.py makes for the extension.

``python -m test.crash.build BUILD PROGRAM`` builds PROGRAM in BUILD from PROGRAM.cpp, test/support/native/scenario.cpp
and the extension's objects, with the same compiler and flags. The objects are those of ``setup.py build_ext --inplace``
or, if those are missing or out of date, built below BUILD.
``python -m test.crash.build BUILD PROGRAM FOLDER ISA`` then builds one in FOLDER, from the variants of native sources
that lie there at their paths below native/ and, for the rest, those objects; it has the kernels of the one instruction
set that are made with the variants.
What is up to date is left alone. Builds below one BUILD take turns, since the processes that run tests begin together.
"""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

from test.support.native.toolchain import SCENARIO, Toolchain

OWN = Path(__file__).resolve().parent
# What a worker is made of, without Python.
PARTS = ("hypers", "control", "dispatch", "draft_queue", "logged_step", "step", "thread_pool")


def main(build: str, program: str, folder: str = "", isa: str = "") -> None:
    """Build it."""
    tools = Toolchain(Path(build))
    with open(tools.folder / "lock", "w") as lock:
        # Without it one process writes a program that another runs: "Text file busy", or half an object.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build(tools, program, folder, isa)


def _build(tools: Toolchain, program: str, folder: str, isa: str) -> None:
    shipped = tools.shipped()
    objects = {part: shipped[part] for part in PARTS}
    own, kernels, target = [OWN / f"{program}.cpp", SCENARIO], [], tools.folder / program
    if folder:
        variants = Toolchain(Path(folder))
        objects |= {path.stem: variants.compiled([path])[0] for path in variants.folder.glob("*/*.cpp")}
        kernels, target = variants.kernels([isa]), variants.folder / program
    # Without lazy binding: the step itself is to be traced.
    tools.link([*tools.compiled(own), *kernels, *objects.values()], target, ["-Wl,-z,now"])


if __name__ == "__main__":
    main(*sys.argv[1:])
