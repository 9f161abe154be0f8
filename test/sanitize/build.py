"""Programs over the native sources, built with sanitizers.

``python -m test.sanitize.build FOLDER PROGRAM SANITIZERS [MUTANT]``: PROGRAM of this folder, as FOLDER/program, with
all native sources but the bindings compiled anew with ``-fsanitize=SANITIZERS``. MUTANT, a control.cpp, takes the place
of that. FOLDER is on the include path: a program named ``memory`` there would shadow the header <memory>.
"""

from __future__ import annotations

import sys
from pathlib import Path

from test.support.native.toolchain import NATIVE, SCENARIO, Toolchain

OWN = Path(__file__).resolve().parent
ISAS = ("baseline", "v3", "v4")
WRAPPED = ("mmap", "read", "write")


def main(folder: str, program: str, sanitizers: str, mutant: str = "") -> None:
    """Build it."""
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]
    tools = Toolchain(Path(folder), flags)
    skipped = {*(f"isa_{isa}" for isa in ISAS), *(["control"] if mutant else [])}
    unbound = [path for path in sorted(NATIVE.glob("*/*.cpp")) if path.parent.name != "bindings"]
    sources = [path for path in unbound if path.stem not in skipped]
    own = [OWN / f"{program}.cpp", SCENARIO, *map(Path, [mutant] if mutant else [])]
    objects = [*tools.compiled([*sources, *own]), *tools.kernels(ISAS)]
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED] if program == "race" else []
    tools.link(objects, tools.folder / "program", wraps)


if __name__ == "__main__":
    main(*sys.argv[1:])
