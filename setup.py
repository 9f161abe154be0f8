"""Build of the native extension, and nothing else: every other fact about the package is in setup.cfg.

The kernels are compiled once per instruction set, each into a static library of its own with its own flags, and
linked into one extension that picks a table at run time. Only setuptools and pybind11 are needed.

The environment variable ZERO_OPT_NATIVE decides what happens without a working compiler:
    unset     the package installs without the extension and says so
    require   the build fails
    skip      the extension is not built at all
"""

import glob
import os
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

REQUIRED = os.environ.get("ZERO_OPT_NATIVE") == "require"
BUILD_ERRORS = (BaseError, CCompilerError, OSError)
EXACT_MATHS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
CXX = ["-std=c++17", "-fvisibility=hidden"]
HEADERS = sorted(glob.glob("native/*/*.hpp") + glob.glob("native/*/*.inl"))
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

    return Extension(
        "zero_opt._native",
        sources=SOURCES,
        include_dirs=["native", pybind11.get_include()],
        define_macros=[("ZERO_OPT_X86_ISAS", "1")] if len(isas()) > 1 else [],
        extra_compile_args=[*CXX, "-O2", "-ffp-contract=off", "-pthread"],
        extra_link_args=["-pthread"],
        depends=HEADERS,
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


if os.environ.get("ZERO_OPT_NATIVE") == "skip" or sys.platform == "win32":
    setup()
else:
    setup(
        ext_modules=[extension()],
        libraries=[kernel_library(isa) for isa in isas()],
        cmdclass={"build_clib": BuildKernels, "build_ext": BuildNative},
    )
