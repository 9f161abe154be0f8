"""What a rank does for the others alone keeps it no longer than a little, even if the backend never returns."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from test.support.failures import PATIENCE_S
from zero_opt.comm import waits_beside
from zero_opt.comm.groups import Group
from zero_opt.comm.waits_beside import Broken, Courtesies, outcome
from zero_opt.errors import PeerLost
from zero_opt.system import background_thread
from zero_opt.system.background_thread import SerialThread
from zero_opt.system.future import Future


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Calls of this wait for ever, until the test is over."""
    monkeypatch.setattr(waits_beside, "_COURTESY_S", 0.1)
    event = threading.Event()
    yield event
    event.set()


def _ended(call: Any) -> bool:
    """Whether a call returns in time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 4)
    return not thread.is_alive()


def test_what_does_not_come_back_is_left_and_nothing_follows_it(blocked: threading.Event) -> None:
    courtesies, done = Courtesies(), list[int]()
    courtesies.do(lambda: done.append(1))
    begun = time.monotonic()
    courtesies.do(blocked.wait)
    assert time.monotonic() - begun < PATIENCE_S / 4
    assert courtesies.stuck
    courtesies.do(lambda: done.append(2))
    assert done == [1]
    blocked.set()
    deadline = time.monotonic() + PATIENCE_S
    while courtesies.stuck and time.monotonic() < deadline:
        time.sleep(0.01)
    courtesies.do(lambda: done.append(3))
    assert done == [1, 3]


@pytest.mark.parametrize("where", ["recv", "farewell", "shutdown"])
def test_a_group_is_left_where_the_backend_does_not_return(blocked: threading.Event, where: str) -> None:
    asked = list[str]()

    def called(name: str) -> Any:
        def call(*_: object) -> Any:
            asked.append(name)
            if name == where:
                blocked.wait()
            return SimpleNamespace(wait=lambda *_: None)

        return call

    group: Any = object.__new__(Group)
    group._pid, group.broken, group._aborted = os.getpid(), Broken(), threading.Lock()
    group._used, group.backend, group.device_backends, group._stages = {1}, "gloo", {}, []
    group.farewell, group._waits, group.courtesies = called("farewell"), SimpleNamespace(close=list), Courtesies()
    backend = SimpleNamespace(shutdown=called("shutdown"))
    group._pg = SimpleNamespace(recv=called("recv"), _get_backend=lambda _: backend)
    assert _ended(group.disconnect)
    assert _ended(group.close)
    assert asked[-1] == where
    assert group._pg is None


def test_a_wait_that_a_broken_connection_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_beside, "_WAITS_END_S", 0.1)
    broken, looks = Broken(), list[int]()
    assert broken.begin()
    assert not broken.begin()
    with pytest.raises(PeerLost, match="connections have broken"):
        outcome(Future[None](), lambda: broken.lookout(lambda: looks.append(1)))
    assert looks


@pytest.fixture
def thread_at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A thread that waits as the exit begins. Joins are noted in place of being waited for."""
    at_exit = SimpleNamespace(interrupted=list[int](), joins=list[Any](), over=threading.Event())
    left = set[threading.Thread]()
    at_exit.serial = SerialThread("waits", lambda: at_exit.interrupted.append(1))
    at_exit.serial.submit(at_exit.over.wait)
    at_exit.thread = thread = at_exit.serial._thread
    threads = SimpleNamespace(
        join=lambda _: at_exit.joins.append(list(left)) or [thread],
        hold=lambda: None,
        leave=lambda thread, _at=0.0: left.add(thread),
    )
    monkeypatch.setattr(background_thread, "_threads", threads)
    monkeypatch.setattr(background_thread, "_over", threading.Event())
    monkeypatch.setattr(background_thread, "_running", {thread: background_thread._running[thread]})
    yield at_exit
    at_exit.over.set()


def test_the_exit_does_not_wait_for_a_thread_that_was_left_and_that_its_interruption_does_not_end(
    thread_at_exit: SimpleNamespace,
) -> None:
    thread_at_exit.serial.leave()
    background_thread._end_all()
    assert thread_at_exit.interrupted
    assert len(thread_at_exit.joins) == 2
    assert all(thread_at_exit.thread in left for left in thread_at_exit.joins)


def test_the_second_end_of_all_threads_does_not_wait_for_what_the_first_has_waited_for(
    thread_at_exit: SimpleNamespace,
) -> None:
    for _ in range(2):
        background_thread._end_all()
    assert [thread_at_exit.thread in left for left in thread_at_exit.joins] == [False, False, True, True]


# Leaves a call soon after the connections that the call waits over have broken.
_EXITS_WITHIN_A_HALF_MESSAGE = """
import threading
from zero_opt.comm.waits_beside import Broken
from zero_opt.system import background_thread
background_thread._PATIENCE_S = 3600.0
thread, broken, began = background_thread.SerialThread("waits"), Broken(), threading.Event()
thread.submit(lambda: (began.set(), threading.Event().wait(3600.0)))
began.wait(3600.0)
broken.begin()
broken.leave(thread)
"""


def test_the_exit_waits_for_a_message_only_until_nothing_can_end_that() -> None:
    subprocess.run([sys.executable, "-c", _EXITS_WITHIN_A_HALF_MESSAGE], check=True, timeout=PATIENCE_S)
