"""Programs of this folder, linked with the objects that setup.py makes for the extension.

``python -m test.crash.build BUILD PROGRAM[=SOURCE] ...`` builds the extension below BUILD, as setup.py does, and there
PROGRAM from PROGRAM.cpp, scenario.cpp and the extension's objects, with the same compiler and flags. With SOURCE, a
variant of redo_log.cpp, that takes the place of its object, and the program lies beside it. What is up to date is left
alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from test.crash.toolchain import Toolchain

OWN = Path(__file__).resolve().parent
# What a worker is made of, without Python.
PARTS = ("control", "dispatch", "redo_log", "step", "thread_pool")


def main(build: str, *programs: str) -> None:
    """Build everything."""
    tools = Toolchain(Path(build))
    shipped = tools.shipped()
    for program in programs:
        name, _, variant = program.partition("=")
        objects = {part: shipped[part] for part in PARTS}
        target = tools.folder / name
        if variant:
            objects["redo_log"] = Toolchain(Path(variant).parent).compiled([Path(variant)])[0]
            target = Path(variant).with_suffix("")
        own = tools.compiled([OWN / f"{name}.cpp", OWN / "scenario.cpp"])
        # Without lazy binding: the step itself is to be traced.
        tools.link([*own, *objects.values()], target, ["-Wl,-z,now"])


if __name__ == "__main__":
    main(*sys.argv[1:])
