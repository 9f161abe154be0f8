"""Programs of test/crash, linked with the objects that setup.py makes for the extension.

Run by path, ``python build.py BUILD PROGRAM[=SOURCE] ...``: builds the extension below BUILD, as setup.py does, and
there PROGRAM from PROGRAM.cpp, scenario.cpp and the extension's objects, with the same compiler and flags. With SOURCE,
a variant of redo_log.cpp, that is compiled and takes the place of its object. What is up to date is left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import setuptools  # noqa: F401  makes distutils its own

ROOT = Path(__file__).resolve().parents[2]
OWN = Path(__file__).resolve().parent
# What a worker is made of, without Python.
PARTS = ("control", "dispatch", "redo_log", "step", "thread_pool")


def _build(folder: Path) -> Any:
    """The command that has built the extension below a folder."""
    objects, libraries = str(folder / "objects"), str(folder / "libraries")
    arguments = ["-q", "build_ext", "--build-temp", objects, "--build-lib", str(folder / "package")]
    arguments += ["build_clib", "--build-temp", objects, "--build-clib", libraries]
    distribution = importlib.import_module("distutils.core").run_setup("setup.py", arguments, stop_after="commandline")
    for name in ("build_clib", "build_ext"):
        distribution.run_command(name)
    return distribution.get_command_obj("build_ext")


def _compiled(command: Any, sources: list[Path], folder: Path) -> list[str]:
    """Objects of some sources, made as those of the extension."""
    extension = command.extensions[0]
    found = []
    for source in sources:
        target = folder / (source.stem + ".o")
        needed = [source, *OWN.glob("*.hpp"), *(ROOT / "native").glob("*.hpp")]
        if not target.exists() or target.stat().st_mtime < max(path.stat().st_mtime for path in needed):
            # distutils puts an object where its source lies, below the output's folder.
            with contextlib.chdir(source.parent):
                command.compiler.compile(
                    [source.name],
                    output_dir=str(folder),
                    macros=extension.define_macros,
                    include_dirs=[str(ROOT / "native"), str(OWN)],
                    extra_postargs=extension.extra_compile_args,
                )
        found.append(str(target))
    return found


def main(build: str, *programs: str) -> None:
    """Build everything."""
    folder = Path(build).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["ZERO_OPT_NATIVE"] = "require"
    os.chdir(ROOT)
    command = _build(folder)
    objects = {path.stem: str(path) for path in (folder / "objects" / "native").glob("*.o")}
    libraries = sorted(path.name[3:-2] for path in (folder / "libraries").glob("lib*.a"))
    for program in programs:
        name, _, variant = program.partition("=")
        parts = dict(objects)
        if variant:
            parts["redo_log"] = _compiled(command, [Path(variant)], Path(variant).parent)[0]
        own = _compiled(command, [OWN / f"{name}.cpp", OWN / "scenario.cpp"], folder)
        command.compiler.link_executable(
            [*own, *(parts[part] for part in PARTS)],
            str(Path(variant).with_suffix("") if variant else folder / name),
            libraries=libraries * 2,
            library_dirs=[str(folder / "libraries")],
            extra_postargs=["-pthread", "-Wl,-z,now"],
            target_lang="c++",
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
