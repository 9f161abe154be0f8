"""The module `torch.sim`: what torch and training programs expect of a device type's module."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def _index(device: Any, current: int) -> int:
    """Return the index that `device` names: an int, a string, a torch.device, or None for the current one."""
    if device is None:
        return current
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current if index is None else index


def device_module(native: Any, begin: Callable[[], None]) -> ModuleType:
    """Return the module that torch registers as `torch.sim`; torch calls `begin` before it makes the first tensor."""

    class Stream(torch.Stream):
        """A stream of the simulated accelerator."""

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            if kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, torch.device("sim", _index(device, native.current_device())), priority=priority)

    class Event(torch.Event):
        """An event of the simulated accelerator."""

        def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:
            return super().__new__(cls, "sim", enable_timing=enable_timing)

    class DeviceScope:
        """A `with` block on another device."""

        def __init__(self, device: Any) -> None:
            self._index = _index(device, native.current_device())
            self._before = -1

        def __enter__(self) -> None:
            self._before = native.current_device()
            native.set_device(self._index)

        def __exit__(self, *_: object) -> None:
            native.restore_device(self._before)

    module: Any = ModuleType("torch.sim")
    module.Stream, module.Event, module.device = Stream, Event, DeviceScope
    module.init = module._lazy_init = begin
    _add_device_functions(module, native)
    _add_stream_functions(module, native)
    _add_random_functions(module)
    module.amp_available = True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_bf16_supported = lambda: True
    return module


def _add_device_functions(module: Any, native: Any) -> None:
    module.device_count = native.device_count
    module.is_available = lambda: bool(native.device_count())
    module.is_initialized = module.is_available
    module._is_in_bad_fork = lambda: False
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(_index(device, native.current_device()))
    module._exchange_device = native.exchange_device
    module._maybe_exchange_device = native.exchange_device
    module.get_device_name = lambda device=None: "simulated accelerator"
    module.memory_allocated = torch.accelerator.memory_allocated
    module.empty_cache = torch.accelerator.empty_cache


def _add_stream_functions(module: Any, native: Any) -> None:
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(_index(device, native.current_device()))

    module.synchronize = synchronize
    module.current_stream = lambda device=None: torch.accelerator.current_stream(
        _index(device, native.current_device())
    )
    module.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=_index(device, native.current_device()), device_type=native.device_type
    )
    module.set_stream = torch.accelerator.set_stream
    module.stream = lambda stream: stream  # a torch.Stream is a `with` block


def _add_random_functions(module: Any) -> None:
    module.manual_seed = module.manual_seed_all = lambda seed: None  # kernels draw from the CPU's generator
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
