"""Every decision that depends on the kind of device: no other module compares a device type with a string.

What ``torch.accelerator`` and the process group can answer is asked of them, so that CUDA, ROCm, XPU, NPU and whatever
else registers with torch take the same road.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .streams import AcceleratorStreams, Streams

HOST = torch.device("cpu")
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
# Backends that carry tensors in host memory, or that block the calling thread with those of an accelerator.
_HOST_BACKENDS = ("fake", "gloo", "mpi", "threaded", "ucc", "undefined")


def is_host(device: torch.device) -> bool:
    """Return whether tensors of this device lie in host memory, where native code may take their address."""
    return device.type == "cpu"


def is_meta(device: torch.device) -> bool:
    """Return whether tensors of this device have no memory."""
    return device.type == "meta"


def has_streams(device: torch.device) -> bool:
    """Return whether work of this device is merely enqueued when a call returns."""
    return not is_host(device) and not is_meta(device)


def build_streams(device: torch.device, priority: int = 0) -> Streams:
    """Return streams of a device: none where work is done when a call returns. ``priority`` is the side stream's."""
    return AcceleratorStreams(device, priority) if has_streams(device) else Streams()


def read_here(tensor: Tensor) -> None:
    """Let the memory of a tensor, which may be another stream's, be reused only once the current stream has read it."""
    if has_streams(tensor.device):
        stream = torch.accelerator.current_stream(tensor.device)
        for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            part.record_stream(stream)


def pins(device: torch.device) -> bool:
    """Return whether torch can allocate page-locked host memory for copies to and from this device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type


def runtime_of(device: torch.device) -> Any:
    """Return the runtime that can lock pages of ordinary host memory, as ``torch.cuda.cudart()``, or ``None``."""
    if not has_streams(device):
        return None
    runtime = getattr(torch.get_device_module(device), "cudart", None)
    return None if runtime is None else runtime()


def device_backends(config: str) -> dict[str, str]:
    """Return the backends of a process group that carry accelerator tensors by themselves, by device type.

    Args:
        config: as ``torch.distributed.get_backend_config`` has it, for example ``"cpu:gloo,cuda:nccl"``.
    """
    pairs = (entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return {kind: name for kind, name in pairs if kind != HOST.type and name.lower() not in _HOST_BACKENDS}


def carries(config: str, device: torch.device) -> bool:
    """Return whether a process group of this configuration takes tensors of a device, by whatever backend."""
    return device.type in (entry.split(":", 1)[0] for entry in config.split(","))


def thread_device() -> Callable[[], None]:
    """Return a call for a new thread to make first, which gives it the current device of this thread.

    A thread starts on device 0, and to leave a stream there would make a context on device 0, hundreds of MB. And the
    capture of a CUDA graph, wherever it is, fails by default with a call of any thread that is not told to be lenient.
    """
    if not in_use():
        return lambda: None
    index = torch.accelerator.current_device_index()

    def begin() -> None:
        torch.accelerator.set_device_index(index)
        _leave_captures_alone()

    return begin


def _leave_captures_alone() -> None:
    """Let calls of this thread pass, and end no capture, while another thread captures a CUDA graph."""
    exchange_mode = _capture_mode()
    if exchange_mode is not None:
        exchange_mode(ctypes.byref(ctypes.c_int(_RELAXED)))


@cache
def _capture_mode() -> Any:
    """Return ``cudaThreadExchangeStreamCaptureMode``, which torch binds nowhere; ``None`` without CUDA."""
    version = torch.version.cuda
    if version is not None:
        with contextlib.suppress(OSError, AttributeError):  # the library that torch has loaded already
            return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}").cudaThreadExchangeStreamCaptureMode
    return None


def in_use() -> bool:
    """Return whether this process uses an accelerator; asking for its current device would make it begin to."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return False
    initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return bool(initialized()) if initialized is not None else True


def pci_address(number: int) -> str | None:
    """Return where an accelerator is on the PCI bus, as ``0000:3b:00.0``; ``None`` where torch does not say."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    properties = None
    if accelerator is not None:
        properties = getattr(torch.get_device_module(accelerator), "get_device_properties", lambda _: None)(number)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if not all(isinstance(part, int) for part in parts):
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
