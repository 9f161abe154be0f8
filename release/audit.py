"""Check what is to be uploaded: ``python -m release.audit FOLDER`` prints every file, and what is wrong with it.

auditwheel says from which glibc on a wheel runs. The rest are promises of this project.
"""

from __future__ import annotations

import email
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from .build import GLIBC, MACHINES, tracked

WHEEL_BYTES = 1_500_000
# The parts of glibc, which every manylinux machine has.
LIBRARIES = {
    *("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"),
    *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
}
EXPORTED = {"PyInit__native"}
_ARCHITECTURES = {"x86_64": "x64", "aarch64": "AArch64"}
# Tracked files that only the repository itself needs.
_REPOSITORY = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")


def extension_findings(binary: bytes, machine: str) -> Iterator[str]:
    """Yield what is wrong with an extension for a machine."""
    elf = ELFFile(io.BytesIO(binary))
    if elf.get_machine_arch() != _ARCHITECTURES[machine]:
        yield f"is for {elf.get_machine_arch()}"
    for section in elf.iter_sections():
        if section.name.startswith(".debug") or section.name == ".symtab":
            yield f"has {section.name}: not stripped"
        if isinstance(section, DynamicSection):
            yield from (f"needs {tag.needed}" for tag in section.iter_tags("DT_NEEDED") if tag.needed not in LIBRARIES)
            paths = [tag.entry.d_tag for name in ("DT_RPATH", "DT_RUNPATH") for tag in section.iter_tags(name)]
            yield from (f"has a {name}" for name in paths)
        if isinstance(section, SymbolTableSection) and section.name == ".dynsym":
            defined = {symbol.name for symbol in section.iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"}
            if defined != EXPORTED:
                yield f"exports {', '.join(sorted(defined ^ EXPORTED)[:5])}"
        if isinstance(section, GNUVerNeedSection):
            names = [version.name for _, versions in section.iter_versions() for version in versions]
            yield from (f"needs {name}" for name in names if not of_glibc(name))
    flags = [segment["p_flags"] for segment in elf.iter_segments("PT_GNU_STACK")]
    if not flags or flags[0] & 1:
        yield "has an executable stack"


def of_glibc(version: str) -> bool:
    """Return whether this is a version of a symbol that the glibc of the wheels' tag has."""
    found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version)
    return found is not None and (int(found[1]), int(found[2])) <= GLIBC


def metadata_findings(text: str) -> Iterator[str]:
    """Yield what is wrong with the metadata of a wheel or an sdist."""
    metadata = email.message_from_string(text)
    wanted = ("Author", "Keywords", "License-Expression", "Project-URL", "Requires-Python", "Summary")
    yield from (f"has no {name}" for name in wanted if name not in metadata)
    relative = re.findall(r"\]\((?!#|\w+:)[^)]*\)", str(metadata.get_payload()))
    yield from (f"has a relative link in its description: {link}" for link in relative)


def wheel_findings(path: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel."""
    _, version, python, _, platform = path.stem.split("-")
    machine = next(name for name in MACHINES if platform.endswith(name))
    if path.stat().st_size >= WHEEL_BYTES:
        yield f"has {path.stat().st_size} bytes"
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        extension = f"zero_opt/_native.cpython-{python.removeprefix('cp')}-{machine}-linux-gnu.so"
        missing = {extension, *sources()} - names
        yield from (f"lacks {name}" for name in sorted(missing))
        information = f"zero_opt-{version}.dist-info/"
        foreign = [name for name in names if not name.startswith(("zero_opt/", information))]
        yield from (f"has {name}" for name in sorted(foreign))
        if extension in names:
            yield from extension_findings(wheel.read(extension), machine)
        yield from metadata_findings(wheel.read(f"{information}METADATA").decode())
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    runs_from = tuple(map(int, re.findall(r"\d+", json.loads(done.stdout)["overall_tag"])[:2]))
    if not (2, 5) <= runs_from <= GLIBC:
        yield f"is {json.loads(done.stdout)['overall_tag']} to auditwheel"


def sources() -> set[str]:
    """Return the files that every wheel has."""
    return {name for name in tracked() if name.startswith("zero_opt/")}


def sdist_findings(path: Path) -> Iterator[str]:
    """Yield what is wrong with an sdist."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        wanted = {name for name in tracked() if not name.startswith(_REPOSITORY)}
        yield from (f"lacks {name}" for name in sorted(wanted - names))
        yield from (f"has {name}" for name in sorted(names - tracked() - {"PKG-INFO"}))
        information = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        yield from metadata_findings(information.read().decode() if information else "")


def main(target: str) -> None:
    """Print what there is to say, and fail if anything is wrong."""
    wrong = False
    for path in sorted(Path(target).iterdir()):
        check = wheel_findings if path.suffix == ".whl" else sdist_findings
        found = list(check(path))
        wrong |= bool(found)
        print(f"{path.stat().st_size:>9} {path.name}", *(f"    {finding}" for finding in found), sep="\n")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
