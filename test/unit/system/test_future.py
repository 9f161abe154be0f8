"""Waits for what another thread does, which a signal handler's exception may end at any instruction."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import pytest

from zero_opt.system import future as module
from zero_opt.system.future import Future

SECONDS = 60.0  # nothing hangs


def test_a_result_and_an_exception_arrive() -> None:
    result, failure = Future[int](), Future[int]()
    with pytest.raises(TimeoutError):
        result.result(0)
    assert not result.wait(0.01)
    assert not result.done()
    threading.Thread(target=result.set_result, args=(5,)).start()
    assert result.result(SECONDS) == 5
    assert result.exception() is None
    assert result.wait(0)
    assert result.done()
    threading.Thread(target=failure.set_exception, args=(OSError("gone"),)).start()
    with pytest.raises(OSError, match="gone"):
        failure.result()
    assert isinstance(failure.exception(0), OSError)


def test_nothing_keeps_an_exception_alive_that_was_raised() -> None:
    class Failed(Exception):
        pass

    future = Future[int]()
    future.set_exception(Failed())
    with pytest.raises(Failed) as caught:
        future.result()
    gone = weakref.ref(caught.value)
    gc.disable()  # a cycle would wait for it
    try:
        del caught, future
        assert gone() is None
    finally:
        gc.enable()


def test_any_number_of_threads_wait() -> None:
    future, seen = Future[str](), list[str]()
    waiting = [threading.Thread(target=lambda: seen.append(future.result(SECONDS))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    future.set_result("over")
    for thread in waiting:
        thread.join(SECONDS)
    assert seen == ["over"] * 8


class _Interrupt:
    """A trace function that raises at one instruction of the module, as a signal handler may."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        return self


def _interrupted(future: Future[int], at: int) -> bool:
    """Return whether a wait was interrupted at its instruction number ``at``, if it has so many."""
    before = sys.gettrace()
    sys.settrace(_Interrupt(at))
    try:
        future.wait(SECONDS)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_no_interrupt_keeps_another_thread_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.05)
    at, was_interrupted = 0, True
    while was_interrupted:
        future = Future[int]()
        other = threading.Thread(target=future.wait)
        setter = threading.Timer(0.01, future.set_result, (at,))
        other.start()
        setter.start()
        was_interrupted = _interrupted(future, at)
        setter.join(SECONDS)
        other.join(SECONDS)
        assert not (setter.is_alive() or other.is_alive())
        assert future.result(0) == at
        at += 1
    assert at > 40
