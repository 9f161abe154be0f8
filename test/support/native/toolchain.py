"""The compiler and the settings that setup.py builds the extension with, for other programs of the same parts.

Imported by scripts only: setuptools changes the process that it is imported in.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import setuptools  # noqa: F401  makes distutils its own

ROOT = Path(__file__).resolve().parents[3]
NATIVE, STUB = ROOT / "native", ROOT / "zero_opt" / "_native.pyi"
# The step that the programs share, and what they include of it.
SCENARIO = Path(__file__).resolve().parent / "scenario.cpp"


@dataclass
class Toolchain:
    """The compiler and flags of the extension, for other programs of its parts.

    Attributes:
        folder: what is built lies below it.
        flags: more than setup.py has.
    """

    folder: Path
    flags: Sequence[str] = ()
    _command: Any = field(init=False)
    _libraries: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._libraries = self.folder / "libraries"
        os.environ["ZERO_OPT_NATIVE"] = "require"
        os.chdir(ROOT)
        arguments = ["-q", "build_ext", "--build-temp", str(self.folder / "objects")]
        arguments += ["--build-lib", str(self.folder / "package")]
        arguments += ["build_clib", "--build-temp", str(self.folder / "objects")]
        arguments += ["--build-clib", str(self._libraries)]
        self._distribution = _setup_with(arguments)
        self._command = self._distribution.get_command_obj("build_ext")
        self._command.ensure_finalized()

    def shipped(self) -> dict[str, str]:
        """The extension's objects by name, without those of the libraries: built in place already, or built here.

        :meth:`link` takes the libraries of the same build from then on.
        """
        built, sources = self._in_place(), [*NATIVE.glob("*/*"), STUB, ROOT / "setup.py"]
        found, libraries = self._objects(built), [built / f"lib{name}.a" for name, _ in self._distribution.libraries]
        if any(_older(path, sources) for path in [*map(Path, found.values()), *libraries]):
            for name in ("build_clib", "build_ext"):
                self._distribution.run_command(name)
            return self._objects(self.folder / "objects")
        self._libraries = built
        return found

    def _objects(self, folder: Path) -> dict[str, str]:
        sources = map(Path, self._command.extensions[0].sources)
        return {path.stem: str(folder / path.with_suffix(".o")) for path in sources}

    def _in_place(self) -> Path:
        """Where ``setup.py build_ext --inplace`` puts objects and libraries."""
        command = _setup_with(["-q"]).get_command_obj("build_ext")
        command.ensure_finalized()
        return ROOT / str(command.build_temp)

    def compiled(self, sources: Iterable[Path], flags: Sequence[str] = ()) -> list[str]:
        """Objects of some sources, made as those of the extension, if what there is is older.

        What lies below the folder at a native header's path is included in its place.
        """
        extension = self._command.extensions[0]
        found = []
        for source in sources:
            target = self.folder / (source.stem + ".o")
            own = [*self.folder.glob("*/*.inl"), *source.parent.glob("*.hpp"), SCENARIO.with_suffix(".hpp")]
            if _older(target, [source, *own, *NATIVE.glob("*/*.hpp"), *NATIVE.glob("*/*.inl")]):
                # distutils puts an object where its source lies, below the output's folder.
                with contextlib.chdir(source.parent):
                    self._compiler().compile(
                        [source.name],
                        output_dir=str(self.folder),
                        macros=extension.define_macros,
                        include_dirs=[str(self.folder), str(NATIVE), str(SCENARIO.parent)],
                        extra_postargs=[*extension.extra_compile_args, *self.flags, *flags],
                    )
            found.append(str(target))
        return found

    def kernels(self, isas: Collection[str]) -> list[str]:
        """Objects of the kernels for some instruction sets, with the flags of their libraries."""
        found = []
        for name, library in self._distribution.libraries:
            if name.rpartition("_")[2] in isas:
                found += self.compiled([ROOT / source for source in library["sources"]], library["cflags"])
        return found

    def link(self, objects: Sequence[str], program: Path, flags: Sequence[str] = ()) -> None:
        """A program of these objects and the libraries that were built here."""
        libraries = sorted(path.name[3:-2] for path in self._libraries.glob("lib*.a"))
        if _older(program, map(Path, objects)):
            self._compiler().link_executable(
                list(objects),
                str(program),
                libraries=libraries * 2,  # they need each other
                library_dirs=[str(self._libraries)],
                extra_postargs=["-pthread", *self.flags, *flags],
                target_lang="c++",
            )

    def _compiler(self) -> Any:
        if self._command.compiler is None or isinstance(self._command.compiler, str):
            customize = importlib.import_module("distutils.sysconfig").customize_compiler
            self._command.compiler = importlib.import_module("distutils.ccompiler").new_compiler()
            customize(self._command.compiler)
        return self._command.compiler


def _setup_with(arguments: Sequence[str]) -> Any:
    """What setup.py declares, with a command line that is read and not run."""
    return importlib.import_module("distutils.core").run_setup("setup.py", arguments, stop_after="commandline")


def _older(target: Path, sources: Iterable[Path]) -> bool:
    """Whether a file is not there, or older than what it is made of."""
    return not target.exists() or target.stat().st_mtime < max(path.stat().st_mtime for path in sources)
