"""Seconds by phase, on a clock that the tests move."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from zero_opt.system.background_thread import SerialThread
from zero_opt.system.phases import BusySeconds, Phase, Seconds
from zero_opt.system.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_an_inner_phase_takes_its_seconds_from_the_outer_one(clock: Clock) -> None:
    seconds = Seconds()
    clock.go(7)  # counts nowhere
    with seconds.counted("other"):
        clock.go(1)
        with Phase("update"):
            clock.go(2)
            with Phase("gather"):
                clock.go(4)
            clock.go(8)
        clock.go(16)
    clock.go(32)
    assert seconds.take() == {"other": 17, "update": 10, "gather": 4}
    assert seconds.take() == {}


def test_calls_add_up_and_what_is_taken_within_one_is_gone(clock: Clock) -> None:
    seconds = Seconds()
    for _ in range(2):
        with seconds.counted("other"):
            clock.go(1)
    with seconds.counted("other"), seconds.counted("inner"):
        clock.go(2)
        assert seconds.take() == {"other": 4}
        clock.go(8)
    assert seconds.take() == {"other": 8}


def test_a_phase_ends_with_an_exception(clock: Clock) -> None:
    seconds = Seconds()

    def fail() -> None:
        with seconds.counted("other"), Phase("update"):
            clock.go(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with seconds.counted("other"):
        clock.go(2)
    assert seconds.take() == {"other": 2, "update": 1}


def test_two_optimizers_and_other_threads_count_apart(clock: Clock) -> None:
    outer, inner = Seconds(), Seconds()

    def elsewhere() -> None:
        with Phase("elsewhere"):
            clock.go(4)

    with outer.counted("other"):
        clock.go(1)
        with inner.counted("other"), Phase("update"):
            clock.go(2)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert inner.take() == {"other": 0, "update": 2}
    assert outer.take() == {"other": 7}


def test_busy_seconds(clock: Clock) -> None:
    busy = BusySeconds()
    clock.go(1)
    for _ in range(2):
        busy.begin()
        clock.go(2)
        busy.begin()
        clock.go(4)
        assert busy.seconds % 6 == 0
        busy.end()
        busy.end()
        clock.go(8)
    assert busy.seconds == 12


def test_a_thread_is_busy_while_it_runs_calls(clock: Clock) -> None:
    thread = SerialThread("test")
    for _ in range(3):
        thread.submit(clock.go, 2.0).result()
        assert until(lambda: thread.busy._state[1] is None, 600)
        clock.go(16)
    assert thread.busy.seconds == 6
    thread.close()


def test_a_profiler_shows_phases_of_all_threads() -> None:
    thread = SerialThread("test")
    thread.submit(lambda: None).result()

    def labeled() -> None:
        with Phase("reduction"):
            torch.ones(1)

    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as profile,
        Phase("norm"),
    ):
        thread.submit(labeled).result()
    thread.close()
    names = [event.name for event in profile.events()]
    assert names.count("zero_opt::norm") == names.count("zero_opt::reduction") == 1


@pytest.mark.parametrize("ends", [False, True])
def test_a_profiler_of_all_threads_that_begins_or_ends_within_a_phase(ends: bool) -> None:
    """On another thread, where torch refuses to end a label that has not begun under the profiler."""
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    inside, go = threading.Event(), threading.Event()
    thread = SerialThread("phases")

    def work() -> None:
        with Phase("reduction"):
            inside.set()
            assert go.wait(60)

    trace = torch.profiler.profile(activities=kinds, experimental_config=config)
    if ends:
        trace.start()
    call = thread.submit(work)
    assert inside.wait(60)
    (trace.stop if ends else trace.start)()
    go.set()
    call.result(60)
    if not ends:
        trace.stop()
    thread.close()
