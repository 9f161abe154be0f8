"""A simulated accelerator, for tests of what only an accelerator does: streams, its own memory, NCCL's collectives.

The device type is called "sim"; its collective backend, "simcomm". An import makes it available, except in pytest's
processes: there torch sees no such device before the first use, so that tests of other things see the machine as it is.
A use is a group with the simcomm backend, `enable()`, or whatever is asked of the extension. Tests need no more than

    if sim.unavailable():
        pytest.skip(sim.unavailable(), allow_module_level=True)
    run_processes(2, fn, backend="cpu:gloo,sim:simcomm")

with `sim.assert_no_races()` at the end of `fn`. Never use the device in pytest's own process: autograd then has
threads, which do not survive the forks of later tests. Tensors of the device cannot be unpickled in that process.

From the extension: `races()` takes the races found since it was last asked, with delays or without; `label(text)` and
`trace(True)` add a label, and the line of Python, to the kernels' names in them. `delays(main, side, comm, seed)` sets
the microseconds that a kernel may be delayed at most, on default streams, other streams and communicators;
`delayed()` is their sum so far. `pinned(True)` has copies from and to all host memory overlap with the host (the
default), `pinned(False)` none, `pinned(None)` those of page-locked memory. `contexts()` says which devices the process
has used, `launches()` and `live_bytes()` count, `synchronize()` waits for all streams of all devices. `Comm(gloo, rank,
size)` is the communicator, to register with a process group by hand.
"""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .build import Unavailable, load
from .device_module import device_module

_reason: str | None = None
_enabled_by: int | None = None


class _Extension:
    """The extension's names; the process has the devices from the first one on that is asked for."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._loaded, name)
        enable()
        return found


C: Any = None


def unavailable() -> str | None:
    """Return why there is no simulated accelerator here, or None."""
    return _reason


def enable() -> None:
    """Give this process its two devices."""
    global _enabled_by
    if C is None:
        raise RuntimeError(_reason)
    if _enabled_by is not None:
        return
    _enabled_by = os.getpid()
    torch.utils.rename_privateuse1_backend("sim")
    # Autograd's threads do not survive a fork: they start with the first tensor.
    torch._register_device_module("sim", device_module(C, C.start_autograd))
    C.enable()
    atexit.register(C.stop)


def assert_no_races() -> None:
    """Fail with the races found since they were last taken."""
    found = C.races()
    assert not found, "\n".join(found)


def _create_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    enable()
    return C.Comm(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)


def __getattr__(name: str) -> Any:
    """Give what the extension has: `from test.accelerator import races`."""
    if C is None or name.startswith("__"):
        raise AttributeError(f"no {name} here{': ' + _reason if _reason else ''}")
    return getattr(C, name)


if dist.is_available() and dist.is_gloo_available():
    try:
        C = _Extension(load())
        dist.Backend.register_backend("simcomm", _create_backend, devices=["sim"])
        if "pytest" not in sys.modules:
            enable()
    except Unavailable as exc:
        _reason = str(exc)
else:
    _reason = "the simulated accelerator needs torch.distributed with gloo"
