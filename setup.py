"""Build of the native extension, and the package's page: every other fact about the package is in setup.cfg.

The kernels are compiled once per instruction set, each into a static library of its own with its own flags, and
linked into one extension that picks a table at run time. Only setuptools and pybind11 are needed.

The environment variable ZERO_OPT_NATIVE decides what happens without a working compiler:
    unset     the package installs without the extension and says so
    require   the build fails
    skip      the extension is not built at all
"""

import configparser
import glob
import hashlib
import os
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

REQUIRED = os.environ.get("ZERO_OPT_NATIVE") == "require"
BUILD_ERRORS = (BaseError, CCompilerError, OSError)
EXACT_MATHS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# Without debug information, which Python's own flags ask for: it would be nine tenths of the extension.
CXX = ["-std=c++17", "-fvisibility=hidden", "-g0"]
HEADERS = sorted(glob.glob("native/*/*.hpp") + glob.glob("native/*/*.inl"))
# What others may look up in the extension: pybind11's own classes would else be those of whoever was loaded before.
EXPORTED = "native/bindings/exported.map"
# What the extension is called by. zero_opt/system/extension.py compares its digest with that the extension has.
INTERFACE = "zero_opt/_native.pyi"
# All but those of the per-ISA libraries.
SOURCES = sorted(set(glob.glob("native/*/*.cpp")) - set(glob.glob("native/kernels/isa_*.cpp")))
ISA_FLAGS = {
    "baseline": [],
    "v3": ["-march=x86-64-v3", "-mprefer-vector-width=256"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}


def isas() -> list[str]:
    """The instruction sets that the kernels are compiled for on this platform."""
    x86_64 = sysconfig.get_platform().endswith(("x86_64", "amd64"))
    return list(ISA_FLAGS) if x86_64 else ["baseline"]


def kernel_library(isa: str) -> tuple[str, dict[str, object]]:
    """The static library holding the kernels of one instruction set."""
    flags = CXX + EXACT_MATHS + ISA_FLAGS[isa]
    sources, dependencies = [f"native/kernels/isa_{isa}.cpp"], {"": HEADERS}
    settings = {"sources": sources, "include_dirs": ["native"], "cflags": flags, "obj_deps": dependencies}
    return f"zero_opt_{isa}", settings


def extension() -> Extension:
    """The extension module itself: dispatch and bindings, built for any processor of the platform."""
    import pybind11

    digest = hashlib.sha256(Path(INTERFACE).read_bytes()).hexdigest()[:16]
    macros = [("ZERO_OPT_INTERFACE", f"0x{digest}")]
    return Extension(
        "zero_opt._native",
        sources=SOURCES,
        include_dirs=["native", pybind11.get_include()],
        define_macros=macros + ([("ZERO_OPT_X86_ISAS", "1")] if len(isas()) > 1 else []),
        extra_compile_args=[*CXX, "-O2", "-ffp-contract=off", "-pthread"],
        extra_link_args=["-pthread", "-Wl,-s", f"-Wl,--version-script={EXPORTED}"],
        depends=[*HEADERS, EXPORTED, INTERFACE],
        language="c++",
    )


class BuildKernels(build_clib):
    """Builds the per-ISA libraries; a failure is kept for BuildNative to report, unless they are required."""

    error: Exception | None = None

    def run(self) -> None:
        try:
            super().run()
        except BUILD_ERRORS as error:
            if REQUIRED:
                raise
            self.error = error


class BuildNative(build_ext):
    """Builds the extension on top of the libraries; the package does without it if either fails."""

    def run(self) -> None:
        # An editable install runs build_ext alone; the libraries have to exist by then.
        self.run_command("build_clib")
        kernels = self.get_finalized_command("build_clib")
        try:
            if kernels.error is not None:
                raise kernels.error
            super().run()
        except BUILD_ERRORS as error:
            if REQUIRED:
                raise
            self.extensions = []
            print(
                f"zero_opt: the native extension was NOT built ({error}). The package installs without it: "
                "CPUAdam, CPUAdamW and the offloads that need them will raise NativeUnavailable.",
                file=sys.stderr,
            )


def native() -> dict[str, object]:
    """What setup() is told of the extension."""
    if os.environ.get("ZERO_OPT_NATIVE") == "skip" or sys.platform == "win32":
        return {}
    return {
        "ext_modules": [extension()],
        "libraries": [kernel_library(isa) for isa in isas()],
        "cmdclass": {"build_clib": BuildKernels, "build_ext": BuildNative},
    }


def page() -> dict[str, object]:
    """What a package index shows: README.md and other links, which lead to this version's files in the repository."""
    config = configparser.ConfigParser()
    config.read("setup.cfg", encoding="utf-8")
    url = config["metadata"]["url"]
    version = re.search(r'^__version__ = "(.+)"', Path("zero_opt/__init__.py").read_text("utf-8"), re.MULTILINE)
    files = f"{url}/blob/v{version[1]}" if version else url
    readme = re.sub(r"\]\((?!#|\w+:)", f"]({files}/", Path("README.md").read_text("utf-8"))
    links = {"Source": url, "Issues": f"{url}/issues"}
    links |= {"Documentation": f"{files}/docs/reference.md", "Changelog": f"{files}/CHANGELOG.md"}
    return {"long_description": readme, "project_urls": links}


setup(**page(), **native())
