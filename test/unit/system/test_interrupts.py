"""Signals are kept while what must not be interrupted runs, and handled at its end, whoever handles them."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from zero_opt.system.interrupts import uninterrupted

# The last of them has no name.
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGRTMIN + 1]


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that handlers have been called with; each raises."""
    numbers: list[int] = []

    def handler(number: int, _: object) -> None:
        numbers.append(number)
        raise LookupError(number)

    before = {number: signal.signal(number, handler) for number in SIGNALS}
    yield numbers
    for number, former in before.items():
        signal.signal(number, former)


def _send(numbers: list[int], handled: list[int]) -> None:
    with uninterrupted():
        for number in numbers:
            os.kill(os.getpid(), number)
        assert handled == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_handled_at_the_end(number: int, handled: list[int]) -> None:
    with pytest.raises(LookupError):
        _send([number], handled)
    assert handled == [number]
    with pytest.raises(LookupError):
        os.kill(os.getpid(), number)


def test_all_are_handled_though_one_raises(handled: list[int]) -> None:
    with pytest.raises(LookupError):
        _send(SIGNALS, handled)
    assert sorted(handled) == sorted(SIGNALS)


def test_handlers_are_put_back_where_an_exception_comes_between_them(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[int] = []
    replace = _signal.signal

    def failing(number: int, handler: Any) -> Any:
        replaced.append(number)
        if len(replaced) == len(SIGNALS):
            raise RecursionError
        return replace(number, handler)

    with monkeypatch.context() as patch:
        patch.setattr(_signal, "signal", failing)
        with pytest.raises(RecursionError):
            _send([], handled)
    for number in SIGNALS:
        with pytest.raises(LookupError):
            os.kill(os.getpid(), number)
    assert handled == SIGNALS
