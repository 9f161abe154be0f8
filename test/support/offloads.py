"""Offloads, and forms of state, to run one test under each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zero_opt

# By name; each is made for a folder.
OFFLOADS: dict[str, Callable[[str], Any]] = {
    "cpu": lambda _: zero_opt.CPUOffload(),
    "worker": lambda _: zero_opt.WorkerOffload(threads=1),
    "worker, delay": lambda _: zero_opt.WorkerOffload(threads=1, delay=1),
    "nvme": lambda folder: zero_opt.NVMeOffload(folder, threads=1),
}
FORMS = {
    "fp32": zero_opt.AdamState(),
    "bfloat16": zero_opt.AdamState("bfloat16"),
    "block8": zero_opt.AdamState("block8"),
}
