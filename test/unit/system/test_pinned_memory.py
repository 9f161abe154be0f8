"""Host memory for copies: exact, locked by a runtime that may refuse, unlocked once copies are over."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from zero_opt.errors import OutOfMemory
from zero_opt.system import pinned_memory as module
from zero_opt.system.devices import HOST
from zero_opt.system.pinned_memory import HostMemory, host_memory, pinned_memory
from zero_opt.system.shared_memory import PAGE

# No tensor is made on it: the runtime below is all that anybody asks of it.
DEVICE = torch.device("cuda:0")


class Runtime:
    """A runtime that locks pages as CUDA's does.

    Attributes:
        locked: bytes by address. calls: what was called, in order. refuses: which call of all is refused, if any.
        pending: the error that the next kernel launch raises.
    """

    def __init__(self, refuses: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []
        self.refuses, self.pending = refuses, 0

    def _called(self, name: str) -> bool:
        self.calls.append(name)
        if self.refuses == len(self.calls):
            self.pending = 2
            return False
        return True

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  (CUDA's name)
        """Lock pages."""
        assert flags == 1 and address % PAGE == 0 and nbytes % PAGE == 0 and address not in self.locked
        if not self._called("register"):
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  (CUDA's name)
        """Unlock pages."""
        if not self._called("unregister"):
            return 2
        del self.locked[address]
        return 0

    def launch(self, _: torch.device) -> None:
        """Launch a kernel, whose check clears the error that a refused call has left."""
        self.calls.append("launch")
        self.pending = 0


class Event:
    """An event that passes when somebody waits for it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self.over = runtime, False

    def query(self) -> bool:
        """Return whether it has passed."""
        return self.over

    def synchronize(self) -> None:
        """Wait for it."""
        self.over = True
        self._runtime.calls.append("wait")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(module, "runtime_of", lambda device: None if device == HOST else made)
    monkeypatch.setattr(module, "_clear_error", made.launch)
    monkeypatch.setattr(torch.accelerator, "device_index", NoDevice)
    return made


class NoDevice:
    """What stands for ``torch.accelerator.device_index`` where there is no accelerator."""

    def __init__(self, index: int | None) -> None:
        assert index == DEVICE.index

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("nbytes", "pages"), [(1, 1), (PAGE, 1), (PAGE + 1, 2), (300_000 * PAGE, 300_000), (0, 1)])
def test_whole_pages_of_zeros_locked_as_one(nbytes: int, pages: int, runtime: Runtime) -> None:
    """A copy that begins in one locked range and ends in the next is refused by CUDA, whatever its size."""
    memory = pinned_memory(nbytes, DEVICE)
    assert memory.bytes.dtype is torch.uint8 and memory.bytes.numel() == pages * PAGE
    assert not memory.bytes.any()
    assert runtime.locked == {memory.bytes.data_ptr(): pages * PAGE} and not memory.refused
    memory.release()
    memory.release()
    assert not runtime.locked and runtime.calls == ["register", "unregister"] and not runtime.pending
    memory.bytes.fill_(1)  # who still holds the memory may use it


def test_pageable_memory_asks_no_runtime(runtime: Runtime) -> None:
    memory = host_memory(3 * PAGE)
    assert memory.bytes.numel() == 3 * PAGE and not runtime.calls
    memory.release()
    assert not runtime.calls


def test_what_is_refused_stays_pageable_and_leaves_no_error(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.refuses = 1
    memory = pinned_memory(10 * PAGE, DEVICE)
    assert runtime.calls == ["register", "launch"] and not (runtime.pending or runtime.locked)
    assert "copies wait" in caplog.text and memory.refused
    memory.bytes.fill_(1)
    memory.release()
    assert runtime.calls == ["register", "launch"]


def test_an_error_is_cleared_by_a_launch_that_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[torch.device] = []

    def ones(_: int, device: torch.device, dtype: torch.dtype) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", ones)
    module._clear_error(DEVICE)
    assert launched == [DEVICE]


def test_a_refused_release_leaves_no_error(runtime: Runtime) -> None:
    memory = pinned_memory(10 * PAGE, DEVICE)
    runtime.refuses = 2
    memory.release()
    assert runtime.calls[1:] == ["unregister", "launch"] and not runtime.pending


@pytest.mark.parametrize("collected", [False, True])
def test_the_release_waits_for_copies_that_are_not_over(collected: bool, runtime: Runtime) -> None:
    memory = pinned_memory(PAGE, DEVICE)
    over, first, second = (Event(runtime) for _ in range(3))
    over.over = True
    for event in (over, first, None, second):
        memory.used(event)
    assert memory.under_way == (first, second)
    runtime.calls.clear()
    if collected:
        del memory
        gc.collect()
    else:
        memory.release()
    assert runtime.calls == ["wait", "wait", "unregister"]


def test_a_device_that_has_failed_copies_nothing_any_more(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Event) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    memory = pinned_memory(PAGE, DEVICE)
    memory.used(Event(runtime))
    monkeypatch.setattr(Event, "synchronize", fail)
    memory.release()
    assert not runtime.locked


def test_a_fork_unlocks_nothing(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pinned_memory(PAGE, DEVICE)
    memory.used(Event(runtime))
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    memory.release()
    assert runtime.calls == ["register"]


def test_forks_share_the_pages() -> None:
    """Pages that are copied at a fork would not be those that the device reads."""
    memory = host_memory(PAGE)
    child = os.fork()
    if child == 0:
        memory.bytes.fill_(7)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (memory.bytes == 7).all()


def test_at_exit_nothing_is_unlocked(runtime: Runtime) -> None:
    assert pinned_memory(PAGE, DEVICE).release.atexit is False


@pytest.mark.parametrize("works", [True, False])
def test_torchs_own_where_the_device_has_no_such_runtime(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    zeros = torch.zeros

    def fake(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if not works:
            raise RuntimeError("need to register hooks")
        return zeros(*size, **options)

    monkeypatch.setattr(module, "runtime_of", lambda _: None)
    monkeypatch.setattr(module, "pins", lambda _: True)
    monkeypatch.setattr(torch, "zeros", fake)
    memory = pinned_memory(100, DEVICE)
    assert asked == [True] and memory.bytes.numel() == PAGE
    memory.release()


def test_what_others_have_mapped_is_locked_where_it_lies(runtime: Runtime) -> None:
    arena = host_memory(2 * PAGE).bytes
    memory = HostMemory(arena, DEVICE)
    assert runtime.locked == {arena.data_ptr(): 2 * PAGE}
    memory.release()


def test_more_than_there_is() -> None:
    with pytest.raises(OutOfMemory, match="CPUOffload"):
        host_memory(1 << 60)
