"""A stand-in for /sys on machines of several NUMA nodes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path


def stand_in_system(folder: Path, nodes: Mapping[int, str], devices: Mapping[str, int] | None = None) -> None:
    """Write what /sys has of nodes, each with its list of online cores, and of the nodes of PCI devices."""
    shutil.rmtree(folder / "devices", ignore_errors=True)
    shutil.rmtree(folder / "bus", ignore_errors=True)
    for node, cores in nodes.items():
        path = folder / f"devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(f"{cores}\n")
    for address, node in (devices or {}).items():
        path = folder / "bus/pci/devices" / address
        path.mkdir(parents=True)
        (path / "numa_node").write_text(f"{node}\n")
    if nodes:
        (folder / "devices/system/node/has_cpu").write_text("0\n")
