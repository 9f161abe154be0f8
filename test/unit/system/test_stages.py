"""Calls in stages: which of them are under way together, in which order their stages run, where results go."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from zero_opt.system.background_thread import CallingThread, SerialThread
from zero_opt.system.future import Future
from zero_opt.system.stages import CallStages, Lane, Pieces, UnderWay, in_one_go

PATIENCE = 60  # seconds until a test that hangs fails


class Trace:
    """The stages that were run."""

    def __init__(self) -> None:
        self.run: list[str] = []

    def call(self, name: str, stages: int = 3, fails_in: int = -1) -> CallStages[str]:
        """``name`` with the number of each stage; the result is the name."""
        for number in range(stages):
            if number:
                yield
            self.run.append(f"{name}{number}")
            if number == fails_in:
                raise ValueError(name)
        return name


def lanes(count: int) -> list[Lane]:
    return [Lane("use", number) for number in range(count)]


def test_the_next_call_begins_before_the_second_stage_of_the_one_before() -> None:
    trace, under_way, futures = Trace(), UnderWay(), [Future[str]() for _ in range(3)]
    for lane, name, future in zip(lanes(3), "abc", futures, strict=True):
        under_way.begin(lane, trace.call(name), future)
    assert trace.run == ["a0", "b0", "a1", "c0", "b1"]
    under_way.end_all()
    assert trace.run[5:] == ["a2", "b2", "c1", "c2"]
    assert [future.result(0) for future in futures] == ["a", "b", "c"]
    assert not under_way


def test_a_lane_has_one_call_at_a_time() -> None:
    trace, under_way = Trace(), UnderWay()
    for lane, name in zip([*lanes(2), *lanes(2)], "abcd", strict=True):
        under_way.begin(lane, trace.call(name), Future())
    assert trace.run == ["a0", "b0", "a1", "a2", "c0", "b1", "b2", "d0", "c1"]


def cut(trace: Trace, name: str, count: int, fails: int = -1) -> CallStages[list[str]]:
    """A call that is made up of pieces, two of which may be under way at a time."""
    trace.run.append(name)
    calls = [trace.call(f"{name}.{n}.", fails_in=1 if n == fails else -1) for n in range(count)]
    ended = yield Pieces([(Lane("use", n % 2), call) for n, call in enumerate(calls)])
    trace.run.append(f"{name} ends")
    return [future.result(0) for future in ended]


def test_pieces_are_under_way_as_calls_are_and_their_call_ends_after_them() -> None:
    trace, under_way, futures = Trace(), UnderWay(), [Future[Any]() for _ in range(3)]
    under_way.begin(Lane("use", 2), cut(trace, "a", 3), futures[0])
    assert trace.run == ["a", "a.0.0", "a.1.0", "a.0.1", "a.0.2", "a.2.0", "a.1.1"]
    under_way.begin(Lane("use", 3), trace.call("b"), futures[1])
    assert trace.run[7:] == ["b0", "a.2.1"]
    under_way.begin(Lane("use", 2), cut(trace, "c", 1), futures[2])  # in the lane of a, which ends first
    assert trace.run[9:] == ["a.1.2", "a.2.2", "a ends", "c", "c.0.0", "b1"]
    under_way.end_all()
    assert trace.run[15:] == ["b2", "c.0.1", "c.0.2", "c ends"]
    assert [future.result(0) for future in futures] == [["a.0.", "a.1.", "a.2."], "b", ["c.0."]]
    assert not under_way


def test_the_error_of_a_piece_is_its_calls() -> None:
    trace, under_way, future, after = Trace(), UnderWay(), Future[Any](), Future[Any]()
    under_way.begin(Lane("use", 2), cut(trace, "a", 3, fails=1), future)
    under_way.begin(Lane("use", 3), trace.call("b"), after)
    under_way.end_all()
    assert "a.2.2" in trace.run
    with pytest.raises(ValueError, match=r"a\.1\."):
        future.result(0)
    assert after.result(0) == "b"


def test_pieces_are_run_one_after_the_other_where_nothing_overlaps() -> None:
    trace = Trace()
    assert in_one_go(cut(trace, "a", 2)) == ["a.0.", "a.1."]
    assert trace.run == ["a", "a.0.0", "a.0.1", "a.0.2", "a.1.0", "a.1.1", "a.1.2", "a ends"]


def test_calls_of_another_use_are_not_under_way_together() -> None:
    trace, under_way = Trace(), UnderWay()
    under_way.begin(Lane("one", 0), trace.call("a"), Future())
    under_way.begin(Lane("other", 1), trace.call("b"), Future())
    assert trace.run == ["a0", "a1", "a2", "b0"]


def test_the_oldest_call_goes_on_when_nothing_follows() -> None:
    trace, under_way = Trace(), UnderWay()
    for lane, name in zip(lanes(2), "ab", strict=True):
        under_way.begin(lane, trace.call(name), Future())
    under_way.advance()
    under_way.advance()
    assert trace.run == ["a0", "b0", "a1", "a2", "b1"]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_exception_ends_its_own_call_alone(stage: int) -> None:
    trace, under_way, futures = Trace(), UnderWay(), [Future[str]() for _ in range(3)]
    for lane, name, future in zip(lanes(3), "abc", futures, strict=True):
        under_way.begin(lane, trace.call(name, fails_in=stage if name == "b" else -1), future)
    under_way.end_all()
    assert [futures[0].result(0), futures[2].result(0)] == ["a", "c"]
    assert isinstance(futures[1].exception(0), ValueError)


def test_a_call_of_one_stage_is_over_when_it_has_begun() -> None:
    trace, under_way, future = Trace(), UnderWay(), Future[str]()
    under_way.begin(Lane("use", 0), trace.call("a", stages=1), future)
    assert future.result(0) == "a"
    assert not under_way


def test_in_one_go() -> None:
    trace = Trace()
    assert in_one_go(trace.call("a")) == "a"
    assert trace.run == ["a0", "a1", "a2"]


@pytest.mark.parametrize("thread", [SerialThread("stages"), CallingThread()], ids=["thread", "here"])
def test_results_and_exceptions_arrive_in_futures(thread: Any) -> None:
    trace = Trace()
    futures = [
        thread.submit_stages(Lane("use", number % 2), trace.call, str(number), 1 + number % 4, 0 if number == 5 else -1)
        for number in range(12)
    ]
    assert [future.exception(PATIENCE) is not None for future in futures] == [number == 5 for number in range(12)]
    assert [future.result(PATIENCE) for future in futures if not future.exception(0)] == [
        str(number) for number in range(12) if number != 5
    ]


def test_a_plain_call_begins_when_all_before_are_over() -> None:
    thread, gate, trace = SerialThread("stages"), threading.Event(), Trace()
    thread.submit(gate.wait, PATIENCE)
    for lane in lanes(3):
        thread.submit_stages(lane, trace.call, str(lane.number))
    plain = thread.submit(lambda: [*trace.run])
    gate.set()
    assert plain.result(PATIENCE) == ["00", "10", "01", "20", "11", "02", "12", "21", "22"]
    thread.close()


def test_what_is_under_way_ends_before_a_closed_thread() -> None:
    thread, gate, trace = SerialThread("stages"), threading.Event(), Trace()
    worker = thread.submit(threading.current_thread)
    thread.submit(gate.wait, PATIENCE)
    futures = [thread.submit_stages(lane, trace.call, str(lane.number)) for lane in lanes(3)]
    thread.close()
    gate.set()
    worker.result(PATIENCE).join(PATIENCE)
    assert [future.result(0) for future in futures] == ["0", "1", "2"]
