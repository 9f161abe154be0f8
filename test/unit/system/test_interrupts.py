"""Signals are kept while what must not be interrupted runs, and handled at its end, whoever handles them."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from test.support.failures import PATIENCE_S
from zero_opt.system import interrupts
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


class _At:
    """The module of signals, in which the first of SIGNALS arrives whenever the handler of another one is put back."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __getattr__(self, name: str) -> Any:
        return getattr(_signal, name)

    def signal(self, number: int, handler: Any) -> Any:
        before = _signal.signal(number, handler)
        if number != SIGNALS[0] and handler.__name__ == "handler" and self.left:
            self.left -= 1
            os.kill(os.getpid(), SIGNALS[0])
        return before


@pytest.mark.parametrize("times", [1, 2, 100])
def test_no_handler_is_lost_where_another_raises_as_they_are_put_back(
    times: int, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(SIGNALS[0], signal.getsignal(SIGNALS[1]))
    with monkeypatch.context() as patch:
        patch.setattr(interrupts, "_signal", _At(times))
        with pytest.raises(LookupError):
            _send([signal.SIGTERM, signal.SIGALRM], handled)
    assert {signal.SIGTERM, signal.SIGALRM, SIGNALS[0]} <= set(handled)
    for _ in range(2):
        for number in SIGNALS:
            handled.clear()
            with pytest.raises(LookupError), uninterrupted():
                os.kill(os.getpid(), number)
            assert handled == [number]


def test_a_handler_that_another_one_has_put_in_stays(handled: list[int]) -> None:
    found: list[int] = []

    def first(number: int, _: object) -> None:
        signal.signal(number, lambda again, _: found.append(again))

    signal.signal(signal.SIGUSR1, first)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGUSR1)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert found == [signal.SIGUSR1]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_child_that_another_thread_forks_has_the_handlers(depth: int, handled: list[int]) -> None:
    def fork() -> int:
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = 0
        for number in SIGNALS:
            try:
                os.kill(os.getpid(), number)
            except LookupError:
                found += 1
        os._exit(found)

    with ThreadPoolExecutor(1) as pool, ExitStack() as stretches:
        for _ in range(depth):
            stretches.enter_context(uninterrupted())
        assert pool.submit(fork).result(PATIENCE_S) == len(SIGNALS)
    assert not handled
    with pytest.raises(LookupError):
        os.kill(os.getpid(), SIGNALS[0])


def test_a_handler_may_fork_within(handled: list[int]) -> None:
    statuses: list[int] = []

    def fork(number: int, _: object) -> None:
        child = os.fork()
        if child == 0:
            os._exit(signal.getsignal(signal.SIGUSR1) is fork)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    signal.signal(signal.SIGUSR1, fork)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert statuses[-1] == 1 and len(statuses) == 2
    assert signal.getsignal(signal.SIGUSR1) is fork


def test_two_handlers_that_raise_as_they_are_put_back_leave_none_replaced(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with monkeypatch.context() as patch:
        patch.setattr(interrupts, "_signal", _At(3))
        with pytest.raises(LookupError):
            _send([], handled)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
