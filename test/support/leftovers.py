"""What a run of the tests must not leave behind: processes, files, shared memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

from test.support.descriptors import open_files

_PATIENCE_S = 60.0  # no time is spent where nothing is left
# Of pytest, which clears them itself; of torch, caches, torchrun's empty logs, notes about children that are killed.
_OF_OTHERS = ("pytest-of-", "torchinductor_", "torchelastic_", "pytorch-errorfile-")


def children() -> list[str]:
    """The processes that this one has started and that are still there, zombies too, as "pid (state) command"."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text().replace("\0", " ")[:200]
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid() and "resource_tracker" not in command:
            found.append(f"{folder.name} ({fields[0]}) {command}")
    return found


def shared_memory() -> list[str]:
    """Arenas of the package that this process still maps or has open, and what it has in /dev/shm."""
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:zero_opt" in line]
    found += [f"descriptor {number}: {target}" for number, target in open_files() if "memfd:zero_opt" in target]
    return found + [str(entry) for entry in Path("/dev/shm").glob(f"*_{os.getpid()}_*")]


def files(folder: Path) -> list[str]:
    """What is in the folder for temporary files that the tests have to themselves."""
    return sorted(str(entry) for entry in folder.iterdir() if not entry.name.startswith(_OF_OTHERS))


def left(folder: Path) -> list[str]:
    """Wait for everything to go; return what is left."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        found = [
            *(f"process {child}" for child in children()),
            *(f"shared memory {arena}" for arena in shared_memory()),
            *(f"file {name}" for name in files(folder)),
        ]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)
