"""Functions run by forked ranks that have the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from test.support.rank_processes import run_processes


def on_device(fn: Callable[[], Any]) -> Any:
    """Return what `fn` returns in a forked process that has the devices."""
    return run_processes(1, lambda rank, size: fn(), backend="cpu:gloo,sim:simcomm")[0]


def on_ranks(fn: Callable[[int], Any], **kwargs: Any) -> list[Any]:
    """Return what `fn(rank)` returns on two ranks with a device each."""

    def run(rank: int, size: int) -> Any:
        torch.accelerator.set_device_index(rank)
        return fn(rank)

    return run_processes(2, run, backend="cpu:gloo,sim:simcomm", **kwargs)
