"""Stretches without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

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
