"""The rule that an optimizer is in one call at a time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from test.support.failures import PATIENCE_S
from zero_opt.errors import StepDesync
from zero_opt.optimizer.one_call import OneCall, one_call


class Subject:
    def __init__(self) -> None:
        self._one_call, self.done = OneCall(), list[str]()

    @one_call("opt.step()")
    def step(self, within: Callable[[], Any] = str) -> None:
        within()
        self.done.append("step")

    @one_call("opt.close()")
    def close(self) -> None:
        self.done.append("close")


def test_a_call_inside_another_is_refused_by_name_and_the_outer_one_goes_on() -> None:
    subject = Subject()

    def within() -> None:
        with pytest.raises(StepDesync, match=r"^opt\.close\(\) was called while opt\.step\(\) .*set a flag"):
            subject.close()

    subject.step(within)
    subject.close()
    assert subject.done == ["step", "close"]


def test_a_call_of_another_thread_is_refused_too() -> None:
    subject, said = Subject(), list[str]()

    def call() -> None:
        try:
            subject.close()
        except StepDesync as error:
            said.append(str(error))

    def within() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(300)

    subject.step(within)
    assert len(said) == 1 and subject.done == ["step"]


def test_after_a_call_that_has_raised_the_next_one_goes() -> None:
    subject = Subject()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subject.step(interrupt)
    subject.close()
    assert subject.done == ["close"]


def test_a_closure_may_call_what_it_likes() -> None:
    subject = Subject()
    subject.step(lambda: subject._one_call.outside(subject.close))
    assert subject.done == ["close", "step"] and subject._one_call.under_way is None


def test_a_call_that_a_closure_leaves_under_way_on_another_thread_is_named() -> None:
    subject, begun, over = Subject(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: subject.step(lambda: (begun.set(), over.wait(300))))

    def closure() -> None:
        thread.start()
        assert begun.wait(300)

    with pytest.raises(StepDesync, match=r"opt\.step\(\) was called while opt\.step\(\) is under way"):
        subject.step(lambda: subject._one_call.outside(closure))
    over.set()
    thread.join(300)
    assert subject.done == ["step"]


def test_state_dict_may_be_called_beside_but_nothing_inside_it() -> None:
    subject = Subject()

    def read() -> None:
        with pytest.raises(StepDesync, match=r"opt\.step\(\) was called while opt\.state_dict\(\) is under way"):
            subject.step()
        thread = threading.Thread(target=subject.step)
        thread.start()
        thread.join(300)

    subject._one_call.read(lambda: subject._one_call.read(read))
    subject.step(lambda: subject._one_call.read(str))
    assert subject.done == ["step", "step"]


def test_threads_that_read_at_one_time_leave_nothing_behind() -> None:
    one, both = OneCall(), threading.Barrier(2)

    def reads() -> None:
        both.wait(PATIENCE_S)
        for _ in range(20_000):
            one.read(lambda: None)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        other = threading.Thread(target=reads)
        other.start()
        reads()
        other.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(switching)
    assert not one.reading
