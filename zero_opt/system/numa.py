"""NUMA nodes, as the system lists them: which cores have which memory near, and which node a device is on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from itertools import groupby
from pathlib import Path

SYSTEM = Path("/sys")


def cores_by_node() -> dict[int, frozenset[int]]:
    """Return the cores of each node that has any; empty where the system does not say."""
    nodes = {}
    with contextlib.suppress(OSError, ValueError):
        for folder in sorted((SYSTEM / "devices/system/node").glob("node[0-9]*")):
            cores = parsed_ranges((folder / "cpulist").read_text(encoding="ascii"))
            if cores:
                nodes[int(folder.name.removeprefix("node"))] = cores
        return nodes
    return {}


def node_of_device(pci_address: str | None) -> int | None:
    """Return the node of a device on the PCI bus, as ``0000:3b:00.0``; ``None`` where the system does not say."""
    if pci_address is not None:
        with contextlib.suppress(OSError, ValueError):
            path = SYSTEM / "bus/pci/devices" / pci_address / "numa_node"
            node = int(path.read_text(encoding="ascii"))
            return node if node >= 0 else None
    return None


def parsed_ranges(text: str) -> frozenset[int]:
    """Return numbers that are listed as the kernel does, ``0-3,8``.

    Raises:
        ValueError: they are not.
    """
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(number for span in spans for number in range(int(span[0]), int(span[-1]) + 1))


def ranges(numbers: Collection[int]) -> str:
    """Return numbers as a list of ranges: ``0-3, 8``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
