"""What glibc is told to keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zero_opt.system import freed_memory

MIB = 1 << 20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What mallopt is called with, in place of that of the process."""
    called: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *arguments: called.append(arguments))
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(freed_memory, "_kept", 0)
    for name in freed_memory._CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    return called


def test_twice_the_gradients_are_kept_and_never_less_than_before(calls: list[Any]) -> None:
    for grads in (0, 3 * MIB, MIB, 3 * MIB, 4 * MIB):
        freed_memory.keep_freed(grads)
    assert calls == [(-3, 32 * MIB), (-1, 6 * MIB), (-3, 32 * MIB), (-1, 8 * MIB)]


def test_more_than_mallopt_can_say_is_all(calls: list[Any]) -> None:
    freed_memory.keep_freed(1 << 30)
    assert calls[-1] == (-1, -1)


@pytest.mark.parametrize("name", freed_memory._CHOSEN_BY_USER)
def test_what_the_environment_says_counts(calls: list[Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    freed_memory.keep_freed(MIB)
    assert not calls


def test_another_c_library_is_left_alone(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: SimpleNamespace())
    freed_memory.keep_freed(MIB)
    assert not calls
