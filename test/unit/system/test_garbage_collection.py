"""Stretches without garbage collection."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from test.support.failures import PATIENCE_S
from zero_opt.system import garbage_collection
from zero_opt.system.garbage_collection import without_collection


@pytest.fixture
def started() -> Iterator[list[int]]:
    """The collections that start, by generation."""
    seen, enabled = list[int](), gc.isenabled()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    gc.enable()
    yield seen
    gc.callbacks.remove(note)
    if not enabled:
        gc.disable()


def kept_objects() -> list[list[int]]:
    return [[] for _ in range(20 * gc.get_threshold()[0])]


def test_objects_made_within_start_none(started: list[int]) -> None:
    kept = kept_objects()
    assert started  # the control
    started.clear()
    with without_collection():
        kept += kept_objects()
        assert not started
    kept += kept_objects()
    assert started


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("raising", [True, False])
def test_the_setting_is_restored(enabled: bool, raising: bool, started: list[int]) -> None:
    if not enabled:
        gc.disable()
    try:
        with without_collection(), without_collection():
            assert not gc.isenabled()
            if raising:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert gc.isenabled() == enabled


def test_threads_that_overlap_keep_it_off_until_the_last_has_left(started: list[int]) -> None:
    entered, left = threading.Event(), threading.Event()

    def enter() -> None:
        with without_collection():
            entered.set()
            left.wait(PATIENCE_S)

    thread = threading.Thread(target=enter)
    with without_collection():
        thread.start()
        assert entered.wait(PATIENCE_S)
    assert not gc.isenabled()
    left.set()
    thread.join(PATIENCE_S)
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_forked_child_has_the_setting_though_a_thread_was_within(enabled: bool, started: list[int]) -> None:
    if not enabled:
        gc.disable()

    def fork() -> int:
        child = os.fork()
        return child or os._exit(gc.isenabled())

    with ThreadPoolExecutor(1) as pool:
        with without_collection():
            child = pool.submit(fork).result(PATIENCE_S)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == int(enabled)
    assert gc.isenabled() == enabled


@pytest.mark.parametrize("method", ["begin", "end"])
def test_an_interrupt_at_any_call_of_it_leaves_the_setting(
    method: str, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = getattr(garbage_collection._Pauses, method)

    def interrupted(pauses: Any, pause: object) -> None:
        monkeypatch.setattr(garbage_collection._Pauses, method, called)
        raise KeyboardInterrupt

    monkeypatch.setattr(garbage_collection._Pauses, method, interrupted)
    with pytest.raises(KeyboardInterrupt), without_collection():
        assert method == "end"
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
